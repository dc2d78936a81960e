"""The Triton side: one module a noun, each imported by its first launch. Arguments are checked before they come here."""
