"""Questions about the fleet, put to every process of the gateway: whichever of them a call reaches, all hear it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.gateway.processes.merge import MERGES
from baton.servicekit import get_logger
from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS

log = get_logger(__name__)

#: A process that does not answer within this is passed over: it hears of registered workers with their next heartbeat.
ASK_TIMEOUT_S = 2.0

#: Of a process that is not there (any more, or yet), or stands still.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_Context = grpc.aio.ServicerContext[bytes, bytes]


def socket_of(folder: Path, index: int) -> str:
    """Where process `index` answers its siblings; the folder is its gateway's own (mode 0700)."""
    return f"unix:{folder / str(index)}"


class Relay:
    """In one process: `private` serves the process's own view to its siblings; what `register` adds to a public server asks all of them.

    Requests and answers pass as bytes, with the caller's `authorization`: each process judges the caller for itself.
    """

    def __init__(self, folder: Path, index: int, num_processes: int) -> None:
        self._folder, self._index, self._num_processes = folder, index, num_processes
        self._channels: list[grpc.aio.Channel] = []
        self.private = grpc.aio.server(options=[*SERVER_OPTIONS])

    async def start(self) -> None:
        self.private.add_insecure_port(socket_of(self._folder, self._index))
        await self.private.start()
        for index in range(self._num_processes):
            self._channels.append(grpc.aio.insecure_channel(socket_of(self._folder, index), options=CHANNEL_OPTIONS))

    async def stop(self) -> None:
        """Idempotent."""
        channels, self._channels = self._channels, []
        await asyncio.gather(*(channel.close() for channel in channels), self.private.stop(0))

    @property
    def others(self) -> list[int]:
        """The indexes of the other processes."""
        return [index for index in range(self._num_processes) if index != self._index]

    def answer(self, service: str, method: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answers siblings, and nobody else, on `method`. Before `start`."""

        async def handle(request: bytes, context: _Context) -> bytes:
            return await handler(request)

        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.unary_unary_rpc_method_handler(handle)}
        self.private.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    async def ask(self, index: int, service: str, method: str, request: bytes, timeout_s: float) -> bytes | None:
        """What process `index` answers; None: it does not, or not in time."""
        if not self._channels:  # stopped
            return None
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channels[index].unary_unary(f"/{service}/{method}")
        told = await _outcome(call(request, timeout=timeout_s))
        return told if isinstance(told, bytes) else None

    def register(self, service: str, server: grpc.aio.Server) -> None:
        """Adds `service` to a public server."""
        start = f"/{service}/"
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            method.removeprefix(start): grpc.unary_unary_rpc_method_handler(self._handler(method)) for method in MERGES if method.startswith(start)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def _handler(self, method: str) -> Callable[[bytes, _Context], Awaitable[bytes]]:
        async def relay(request: bytes, context: _Context) -> bytes:
            metadata = [(key, value) for key, value in context.invocation_metadata() or () if key == "authorization"]
            asked: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = [channel.unary_unary(method) for channel in self._channels]
            told = await asyncio.gather(*(_outcome(ask(request, metadata=metadata, timeout=ASK_TIMEOUT_S)) for ask in asked))
            for index, one in enumerate(told):
                if isinstance(one, grpc.aio.AioRpcError) and one.code() in _AWAY:
                    log.warning("a process of this gateway does not answer", process=index, code=one.code().name, method=method)
            chosen = choose(method, told)
            if isinstance(chosen, grpc.aio.AioRpcError):
                await context.abort(chosen.code(), chosen.details() or "", tuple(chosen.trailing_metadata() or ()))
            assert isinstance(chosen, bytes)
            return chosen

        return relay


async def _outcome(call: Awaitable[bytes]) -> bytes | grpc.aio.AioRpcError:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error


def choose(method: str, told: Sequence[bytes | grpc.aio.AioRpcError]) -> bytes | Any:
    """The answer, or the error that is the answer: processes that are away do not count unless all are. Pure."""
    kind, merge, refusal_counts = MERGES[method]
    errors = [one for one in told if isinstance(one, grpc.aio.AioRpcError)]
    refusals = [error for error in errors if error.code() not in _AWAY]
    answers = [kind.FromString(one) for one in told if isinstance(one, bytes)]
    if refusals and (refusal_counts or not answers):
        return refusals[0]
    if not answers:
        return errors[0]
    return merge(answers).SerializeToString()
