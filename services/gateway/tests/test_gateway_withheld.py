"""Clients learn who failed, where and why, and no server's address, at both fronts; the log has it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, rest
from gateway_worker import silence
from google.rpc import status_pb2

from baton.gateway.errors import NotReadyError, UnknownModelError
from baton.gateway.withheld import WITHHELD, told, told_text, without_addresses
from baton.servicekit import KeyRole, new_key
from baton.wire.status import DETAILS_KEY
from baton.wire.v1 import common_pb2

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("prefill server p-1 at 10.0.0.1:8003 was lost: gone", "prefill server p-1 was lost: gone"),
        ("at prefill-0.prefill.ns.svc.cluster.local:8998 is prefill server p-1", f"at {WITHHELD} is prefill server p-1"),
        ("last error: UNKNOWN: ipv4:127.0.0.1:41234: Failed to connect (111)", f"last error: UNKNOWN: {WITHHELD}: Failed to connect (111)"),
        ("last error: ipv6:%5B::1%5D:8003: connect: refused", f"last error: {WITHHELD}: connect: refused"),
        ("no session with p-1 at [fd00::12%eth0]:8998 within 3 s: ", "no session with p-1 within 3 s: "),
        ("DNS resolution failed for decode-0:8004: C-ares status", f"DNS resolution failed for {WITHHELD}: C-ares status"),
        ("dns:///gate.example:80 is away", f"{WITHHELD} is away"),
        ("host 10.1.2.3 is unreachable", f"host {WITHHELD} is unreachable"),
    ],
)
def test_addresses_are_taken_out(text: str, left: str) -> None:
    assert without_addresses(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "the request's deadline of 3.000 s has passed; of prefill server prefill-1f0c it heard: nothing",
        "cuda:0 is out of memory: 12:30",
        "the room stayed in WAITING for 30 s, which --waiting-timeout-s allows [waiting_timeout: ended by gateway in WAITING after 3 ms]",
        "UNAVAILABLE: Stream removed; attempt 2 of at most 3, after lost (prefill) on prefill-1 and decode-1",
        "version 0.1.0 at step 12",
    ],
)
def test_nothing_else_is(text: str) -> None:
    assert without_addresses(text) == text


def test_what_the_client_itself_wrote_stays() -> None:
    assert "10.0.0.1:80" in told_text(UnknownModelError("10.0.0.1:80", "m"))
    assert "10.0.0.1:80" in told(UnknownModelError("10.0.0.1:80", "m").failure()).message
    assert "10.0.0.1:80" not in told_text(NotReadyError("decode server d at 10.0.0.1:80: not connected yet"))


def addresses(stack: Stack) -> list[str]:
    return [worker.address.rpartition(":")[2] for worker in stack.gateway.fleet.workers]


def everything(error: grpc.aio.AioRpcError) -> str:
    """All that the client was sent."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ())[DETAILS_KEY])  # type: ignore[arg-type]
    parts = [error.details() or "", status.message]
    for packed in status.details:
        failure = common_pb2.Failure()
        parts.append(failure.message if packed.Is(failure.DESCRIPTOR) and packed.Unpack(failure) else str(packed))
    return "\n".join(parts)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_lost_server_is_named_by_role_and_instance(split: Stack, victim: str) -> None:
    worker = getattr(split, victim)
    split.script(silence, silence)
    async with httpx.AsyncClient(base_url=split.http, timeout=20) as client:
        posted = asyncio.create_task(client.post("/v1/completions", json=BODY))
        call = split.call(ask())
        await call.read()
        await eventually(lambda: len(worker.starts) == 2)
        await worker.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        answered = await posted
    assert answered.status_code == 503
    instance = split.prefill.instance_id if victim == "prefill" else split.decode.instance_id
    for text in (everything(caught.value), answered.text):
        assert instance in text
        assert victim in text
        assert not [port for port in addresses(split) if port in text], text
        assert "127.0.0.1" not in text


async def test_what_a_server_says_of_another_is_told_without_its_address(split: Stack) -> None:
    split.script(silence, silence)
    call = split.call(ask())
    await call.read()
    start = await split.decode.next_start(1)
    message = "no session with prefill server prefill-9 at 10.3.2.1:8998 within 3 s"
    failure = common_pb2.Failure(code=14, origin=common_pb2.ORIGIN_DECODE, cause="prefill_unreachable", message=message)
    split.decode.event(start.room, failed=failure)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    assert "no session with prefill server prefill-9 within 3 s" in everything(caught.value)
    assert "10.3.2.1" not in everything(caught.value)


async def test_ready_tells_clients_no_addresses(stack_of: Any, tmp_path: Path) -> None:
    key, record = new_key(KeyRole.CLIENT)
    file = tmp_path / "keys"
    file.write_text(record.line() + "\n")
    stack = await stack_of(api_key_file=file)
    await stack.decode.kill()
    await eventually(lambda: bool(stack.gateway.fleet.problems()))
    assert any("127.0.0.1" in problem for problem in stack.gateway.fleet.problems())
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        answer = await client.get("/ready", headers={"authorization": f"Bearer {key}"})
    assert answer.json()["problems"]
    assert "127.0.0.1" not in answer.text
