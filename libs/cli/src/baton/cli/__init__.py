"""The `baton` command."""

__all__: list[str] = []
