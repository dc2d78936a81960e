"""baton.v1.Console over grpc.aio: the same feed for terminals."""

from __future__ import annotations

from contextlib import aclosing

from baton.gateway.callers import Doorkeeper
from baton.gateway.console.feed import Feed
from baton.gateway.errors import GatewayError
from baton.gateway.grpc_front import Context, abort, authorization
from baton.wire.v1 import console_pb2, console_pb2_grpc

SERVICE = "baton.v1.Console"


class ConsoleServicer(console_pb2_grpc.ConsoleServicer):
    def __init__(self, feed: Feed, doorkeeper: Doorkeeper) -> None:
        self._feed, self._doorkeeper = feed, doorkeeper

    async def Watch(self, request: console_pb2.WatchRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Writes rather than yields: a cancellation then arrives here at once."""
        shown = authorization(context)
        try:
            operator = self._doorkeeper.watches_as_operator(shown)
            async with aclosing(self._feed.read(operator=operator)) as frames:
                async for kind, data in frames:
                    if self._doorkeeper.watches_as_operator(shown) is not operator:
                        return
                    await context.write(console_pb2.WatchResponse(kind=kind, json=data))
        except GatewayError as error:
            await abort(context, error)
