"""The console: what has passed through this gateway, kept in bounded memory, and told to whoever watches."""
