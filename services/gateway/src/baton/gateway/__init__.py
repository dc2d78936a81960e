"""The front door of Baton: rooms, fleet, routing, gRPC and OpenAI HTTP.

Nothing is imported here: the entry point comes through this file before it answers signals.
"""

__all__: list[str] = []
