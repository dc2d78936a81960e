"""Model families. One so far: everything that is Llama with other numbers."""
