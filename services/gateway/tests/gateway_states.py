"""Rooms that are led into a state."""

from __future__ import annotations

from typing import Any

from gateway_harness import Stack, eventually
from gateway_worker import TRANSFER, silence

from baton.gateway.room import State
from baton.wire.v1 import inference_pb2, worker_pb2


def advance(stack: Stack, room: int, state: State) -> None:
    """Brings an open room to a state, as the workers would."""
    if state >= State.WAITING:
        stack.decode.event(room, reserved=worker_pb2.Reserved(pages=1))
        stack.prefill.event(room, bootstrapped=worker_pb2.Bootstrapped())
    if state >= State.TRANSFERRING:
        stack.prefill.event(room, transfer_started=worker_pb2.TransferStarted())
        stack.prefill.tokens(room, 0, [100])
    if state >= State.SUCCESS:
        stack.prefill.event(room, transferred=worker_pb2.Transferred(transfer=TRANSFER))
        stack.decode.event(room, kv_ready=worker_pb2.KvReady())
        stack.decode.tokens(room, 1, [101])


async def open_at(stack: Stack, state: State, request: inference_pb2.GenerateRequest | None = None) -> tuple[Any, int]:
    """A call whose room is in `state`, and the room."""
    stack.script(silence, silence)
    call = stack.call(request)
    await call.read()
    start = await stack.prefill.next_start(len(stack.prefill.starts) or 1)
    await stack.decode.wait(lambda: any(other.room == start.room for other in stack.decode.starts))
    advance(stack, start.room, state)
    await eventually(lambda: stack.gateway.rooms._rooms[start.room].machine.state is state)
    if state >= State.SUCCESS:
        await eventually(lambda: stack.gateway.rooms._rooms[start.room].passage.num_tokens == 2)
    return call, start.room
