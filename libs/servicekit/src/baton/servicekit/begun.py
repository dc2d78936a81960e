"""How many calls a gRPC server has begun, and a door that keeps those that come while it stops."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import grpc
import grpc.aio

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Behavior: TypeAlias = Callable[[Any, Any], Any]

#: By whether requests and responses are streams: where a handler has its function, and how one is made.
_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., _Handler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class Begun:
    """Takes handlers in a server's name, counts the calls that reach one, and keeps new ones waiting between `hold` and `let_go`.

    No interceptor: with one, gRPC makes a coroutine and a cycle of garbage for every call.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.num_calls = 0
        self.is_held = False
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Counted(handler, self) for handler in handlers))

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, _Handler]) -> None:
        """Generated code tells a server twice what it serves. These would go before the generic ones, which are counted."""

    def hold(self) -> None:
        self.is_held = True
        self.may_go_on.clear()

    def let_go(self) -> None:
        self.is_held = False
        self.may_go_on.set()


class _Counted(grpc.GenericRpcHandler):
    def __init__(self, handler: grpc.GenericRpcHandler, begun: Begun) -> None:
        self._handler = handler
        self._begun = begun

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        found = self._handler.service(handler_call_details)
        if found is None:
            return None
        self._begun.num_calls += 1
        return _behind(self._begun.may_go_on, found) if self._begun.is_held else found


def _behind(door: asyncio.Event, handler: _Handler) -> _Handler:
    """The same, begun when `door` is open."""
    name, make = _KINDS[handler.request_streaming, handler.response_streaming]
    behavior = getattr(handler, name)
    kept = _generating(door, behavior) if inspect.isasyncgenfunction(behavior) else _answering(door, behavior)
    return make(kept, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


def _answering(door: asyncio.Event, behavior: _Behavior) -> _Behavior:
    async def kept(request: Any, context: Any) -> Any:
        await door.wait()
        return await behavior(request, context)

    return kept


def _generating(door: asyncio.Event, behavior: _Behavior) -> _Behavior:
    async def kept(request: Any, context: Any) -> Any:
        await door.wait()
        async for response in behavior(request, context):
            yield response

    return kept
