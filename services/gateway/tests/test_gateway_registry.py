"""Workers that register over gRPC: a real gateway, scripted workers, the workers' own client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import EMPTY, Stack, ask, eventually, member, rest
from gateway_registration import KEY, known, serving
from gateway_worker import ScriptedWorker, by_the_book, silence

from baton.gateway.discovery import registry
from baton.servicekit import TlsSettings
from baton.wire.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2
from baton.workerkit.joining.joining import Joining
from baton.workerkit.joining.settings import JoinSettings


async def test_a_pair_registers_serves_and_leaves(start: Callable[..., Any]) -> None:
    stack, (prefill, decode) = await start("prefill", "decode")
    assert not await serving(stack)
    assert any("no server is known yet" in text for text in stack.gateway.fleet.problems())
    async with known(stack, prefill) as one, known(stack, decode) as other:
        await stack.ready()
        assert await serving(stack)
        reply = await stack.reply()
        assert reply.last.report.prefill_instance == prefill.instance_id
        async with httpx.AsyncClient(base_url=stack.http) as client:
            assert (await client.get("/ready")).json()["servers"] == {
                "prefill": {"known": 1, "connected": 1, "usable": 1},
                "decode": {"known": 1, "connected": 1, "usable": 1},
                "plain": {"known": 0, "connected": 0, "usable": 0},
            }
        await one.leave()
        await stack.ready(ready=False)
        assert not await serving(stack)
        await other.leave()
        await eventually(lambda: not stack.gateway.fleet.workers)
    assert stack.gateway.discovery.places.counters["removed", "prefill"] == 1


async def test_plain_servers_join_a_split_and_both_serve(start: Callable[..., Any]) -> None:
    """A mixed fleet: requests go to the pair and to the plain server."""
    stack, workers = await start("prefill", "decode", "plain", routing="round-robin")
    async with contextlib.AsyncExitStack() as exits:
        for worker in workers:
            await exits.enter_async_context(known(stack, worker))
        await eventually(lambda: len(stack.gateway.fleet.routes) == 2)
        replies = [await stack.reply() for _ in range(4)]
        assert len({reply.text for reply in replies}) == 1
        assert {reply.last.report.decode_instance for reply in replies} == {"decode-1", "plain-2"}
        assert stack.gateway.router.decisions == {("round-robin", "next", "split"): 2, ("round-robin", "next", "plain"): 2}


async def test_a_lease_that_nobody_renews_ends_and_an_answer_under_way_does_not(start: Callable[..., Any]) -> None:
    stack, (worker,) = await start("plain")
    go_on = asyncio.Event()

    async def slow(one: ScriptedWorker, begun: worker_pb2.Start) -> None:
        await go_on.wait()
        await by_the_book(one, begun)

    worker.script = slow
    async with known(stack, worker):
        await stack.ready()
        call = stack.call()
        await worker.next_start()
    await stack.ready(ready=False)  # nobody renews it any more
    leaving = stack.gateway.fleet.workers[0]
    assert "its lease of 2 s has expired" in leaving.unusable_because
    assert leaving.connected
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply()
    assert "its lease of 2 s has expired" in str(caught.value.details())
    go_on.set()
    assert (await rest(call))[-1].finish_reason
    await eventually(lambda: not stack.gateway.fleet.workers)
    assert worker.aborts == []


async def test_a_worker_that_is_back_before_its_rooms_have_ended_stays(start: Callable[..., Any]) -> None:
    stack, (worker,) = await start("plain")
    worker.script = silence
    async with known(stack, worker) as announcer:
        await stack.ready()
        call = stack.call()
        await worker.next_start()
        session = len(worker.attached)
        await announcer.leave()
        await stack.ready(ready=False)
    async with known(stack, worker):
        await stack.ready()
        assert len(worker.attached) == session  # the same session: the room on it lives on
        assert stack.gateway.fleet.workers[0].num_rooms == 1
    call.cancel()


async def test_heartbeats_keep_a_worker_for_longer_than_its_lease(start: Callable[..., Any]) -> None:
    stack, (worker,) = await start("plain")
    renewed = 0
    leases = stack.gateway.discovery._registry._leases
    renew = leases.renew

    def counted(instance_id: str, now: float) -> bool:
        nonlocal renewed
        renewed += 1
        return renew(instance_id, now)

    leases.renew = counted
    async with known(stack, worker):
        await eventually(lambda: renewed >= 5, 30.0)  # five thirds of the lease
        assert stack.gateway.fleet.ready
        assert stack.gateway.discovery.places.counters == {("joined", "plain"): 1}


async def test_a_gateway_that_stood_still_drops_nobody(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop was blocked for longer than the lease: no heartbeat could be heard."""
    stack, (worker,) = await start("plain")
    async with known(stack, worker):
        await stack.ready()
        monkeypatch.setattr(registry, "log", _Fails())  # the log line of an expired lease would end the clock's task, which the stack reports
        time.sleep(2.5)  # noqa: ASYNC251 # as a process does that gets no processor
        await asyncio.sleep(2 * registry.TICK_S)
        assert stack.gateway.fleet.ready


class _Fails:
    def warning(self, *words: Any, **more: Any) -> None:
        raise AssertionError(words, more)

    def info(self, *words: Any, **more: Any) -> None: ...


async def test_a_killed_worker_and_its_successor_on_the_same_port(start: Callable[..., Any]) -> None:
    """The dead one's lease ends while the living one serves under the same address."""
    stack, (worker,) = await start("plain")
    async with known(stack, worker):
        await stack.ready()
    await worker.kill()
    await stack.ready(ready=False)
    successor = await worker.successor().start()
    stack.workers.append(successor)
    async with known(stack, successor):
        await stack.ready()
        await eventually(lambda: stack.gateway.discovery.membership.of(registry.Source.REGISTERED).keys() == {successor.instance_id})
        assert stack.gateway.fleet.ready
        assert (await stack.reply()).last.report.decode_instance == successor.instance_id


async def test_a_worker_registers_again_with_a_gateway_that_forgot_it(start: Callable[..., Any]) -> None:
    stack, (worker,) = await start("plain")
    async with known(stack, worker):
        await stack.ready()
        stack.gateway.discovery._registry._leases.end(worker.instance_id)  # as a new gateway process: it never heard of it
        assert stack.gateway.discovery.membership.drop(registry.Source.REGISTERED, worker.instance_id, "forgotten")
        stack.gateway.discovery.places.sync()
        await stack.ready(ready=False)
        await stack.ready()


@pytest.mark.parametrize(
    ("changes", "lease_s", "code", "words"),
    [
        ({"instance_id": ""}, 10, grpc.StatusCode.INVALID_ARGUMENT, "member.instance_id is empty"),
        ({"instance_id": "x" * 64}, 10, grpc.StatusCode.INVALID_ARGUMENT, "is no instance id"),
        ({"instance_id": "two\nlines"}, 10, grpc.StatusCode.INVALID_ARGUMENT, "is no instance id"),
        ({"address": "h" * 100_000 + ":1"}, 10, grpc.StatusCode.INVALID_ARGUMENT, "is not host:port"),
        ({"role": 0}, 10, grpc.StatusCode.INVALID_ARGUMENT, "member.role=0"),
        ({"address": "nowhere"}, 10, grpc.StatusCode.INVALID_ARGUMENT, "member.address='nowhere'"),
        ({}, 1, grpc.StatusCode.INVALID_ARGUMENT, "lease_s=1 is outside [2, 3600]"),
        ({}, 3601, grpc.StatusCode.INVALID_ARGUMENT, "lease_s=3601"),
        ({"model": "big"}, 10, grpc.StatusCode.FAILED_PRECONDITION, "serves model 'big', this gateway 'tiny'"),
    ],
)
async def test_half_a_registration_is_refused(
    start: Callable[..., Any], changes: dict[str, Any], lease_s: int, code: grpc.StatusCode, words: str
) -> None:
    stack, (worker,) = await start("plain")
    stub = fleet_pb2_grpc.RegistryStub(stack.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Register(fleet_pb2.RegisterRequest(member=member(worker, **changes), lease_s=lease_s))
    assert caught.value.code() is code
    assert words in str(caught.value.details())
    assert not stack.gateway.fleet.workers


async def test_no_more_register_than_can_be_looked_after(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a session that is tried again and again: thousands, and the gateway does nothing else."""
    monkeypatch.setattr(registry, "MAX_REGISTERED", 2)
    stack, (worker,) = await start("plain")
    stub = fleet_pb2_grpc.RegistryStub(stack.channel)

    async def register(number: int) -> None:
        there = member(worker, instance_id=f"plain-{number}", address=worker.address if number == 0 else f"127.0.0.1:{number}")
        await stub.Register(fleet_pb2.RegisterRequest(member=there, lease_s=30))

    for number in (0, 1, 0, 1):  # again is no more
        await register(number)
    with pytest.raises(grpc.aio.AioRpcError, match="2 servers are registered with this gateway, the limit is 2") as caught:
        await register(2)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(stack.gateway.fleet.workers) == 2
    await stub.Deregister(fleet_pb2.DeregisterRequest(instance_id="plain-1"))
    await register(2)
    await stack.ready()


async def test_without_its_key_nobody_registers_and_the_file_may_change(start: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-first-key-of-two\n" + KEY)
    stack, (worker,) = await start("plain", registration_key_file=keys)
    stub = fleet_pb2_grpc.RegistryStub(stack.channel)
    request = fleet_pb2.RegisterRequest(member=member(worker), lease_s=10)
    for metadata in ((), (("authorization", "Bearer another-key-quite-long"),), (("authorization", KEY),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Register(request, metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "--registration-key-file" in str(caught.value.details())
    assert not stack.gateway.fleet.workers
    async with known(stack, worker, key=KEY):
        await stack.ready()


async def test_a_worker_is_known_to_every_gateway_that_it_names(stack_of: Callable[..., Any], start: Callable[..., Any]) -> None:
    one, (worker,) = await start("plain")
    other: Stack = await stack_of(**EMPTY)
    join = JoinSettings(gateway_address=(one.grpc_address, other.grpc_address), lease_s=2)
    joining = Joining(join, member(worker), TlsSettings())
    joining.start()
    for stack in (one, other):
        await stack.ready()
        assert (await stack.reply()).last.report.decode_instance == worker.instance_id
    await joining.leave()
    for stack in (one, other):
        await eventually(lambda stack=stack: not stack.gateway.fleet.workers)


async def test_requests_stick_to_a_prefix_until_its_server_is_another_process(start: Callable[..., Any]) -> None:
    stack, (one, other) = await start("plain", "plain", routing="prefix-aware")
    prompt = ask(text="the quick brown fox jumps over the lazy dog " * 8)
    async with contextlib.AsyncExitStack() as exits:
        await exits.enter_async_context(known(stack, one))
        await stack.ready()
        assert (await stack.reply(prompt)).last.report.decode_instance == one.instance_id
        await exits.enter_async_context(known(stack, other))
        await eventually(lambda: len(stack.gateway.fleet.routes) == 2)
        served = {(await stack.reply(prompt)).last.report.decode_instance for _ in range(4)}
        assert served == {one.instance_id}
        decisions = stack.gateway.router.decisions
        assert decisions == {("prefix-aware", "no_prefix", "plain"): 1, ("prefix-aware", "prefix", "plain"): 4}
        assert 0 < stack.gateway.router.prefix_tokens < stack.gateway.router.prompt_tokens
        await one.kill()
        successor = await one.successor().start()
        stack.workers.append(successor)
        await eventually(lambda: successor.instance_id in {worker.instance_id for worker in stack.gateway.fleet.workers})
        assert len(stack.gateway.router._index) == 0  # its prefix cache is gone with it
        await stack.reply(prompt)
        assert decisions["prefix-aware", "no_prefix", "plain"] == 2
