"""Model families: everything that is Llama with other numbers, dense or with experts."""
