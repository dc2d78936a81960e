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
    """Counts the calls that reach a server's handlers, and keeps new ones waiting between `hold` and `let_go`.

    No interceptor: with one, gRPC makes a coroutine and a cycle of garbage for every call.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._door = asyncio.Event()
        self._door.set()

    def hold(self) -> None:
        self._door.clear()

    def let_go(self) -> None:
        self._door.set()

    def count(self, handler: _Handler) -> _Handler:
        """What is to answer the call that `handler` was found for."""
        self.num_calls += 1
        return handler if self._door.is_set() else _behind(self._door, handler)


class Registrar:
    """Takes handlers in a server's name and has `begun` count their calls. Of a server, generated code uses no more than this.

    `begun` does not know the server: one that is dropped without a stop has no cycle that keeps it.
    """

    def __init__(self, server: grpc.aio.Server, begun: Begun) -> None:
        self._server = server
        self._begun = begun

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Counted(handler, self._begun) for handler in handlers))

    def add_registered_method_handlers(self, service_name: str, handlers: Mapping[str, _Handler]) -> None:
        """Generated code tells a server twice what it serves. These would go before the generic ones, which are counted."""


class _Counted(grpc.GenericRpcHandler):
    def __init__(self, handler: grpc.GenericRpcHandler, begun: Begun) -> None:
        self._handler = handler
        self._begun = begun

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> _Handler | None:
        found = self._handler.service(handler_call_details)
        return None if found is None else self._begun.count(found)


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
