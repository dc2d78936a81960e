"""The decode server (and the plain server): receives KV pages and streams the answer.

Nothing is imported here: the entry point comes through this file before it answers signals.
"""

__all__: list[str] = []
