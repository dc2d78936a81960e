"""The front door of Baton: rooms, fleet, routing, gRPC and OpenAI HTTP."""

from baton.gateway.errors import GatewayError, RequestError, RoomFailedError
from baton.gateway.room import Event, Room, State, Verdict

__all__ = ["Event", "GatewayError", "RequestError", "Room", "RoomFailedError", "State", "Verdict"]
