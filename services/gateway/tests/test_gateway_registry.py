"""Workers that register over gRPC, and operators who change the fleet: a real gateway, scripted workers, the workers' own client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import Stack, ask, eventually, member, rest
from gateway_worker import ROLES, ScriptedWorker, by_the_book, silence
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.gateway.discovery import registry
from baton.servicekit import KeyRole, TlsSettings, new_key
from baton.wire.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2
from baton.workerkit.joining.gateway import GatewayAnnouncer
from baton.workerkit.joining.joining import Joining
from baton.workerkit.joining.settings import JoinSettings

KEY = "a-key-that-is-long-enough"
ADMIN, RECORD = new_key(KeyRole.ADMIN)
CLIENT, CLIENT_RECORD = new_key(KeyRole.CLIENT)
EMPTY = {"prefill": 0, "decode": 0, "registration": True, "wait_ready": False}

WorkerName = fleet_pb2.WorkerName


def shown(key: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


@contextlib.asynccontextmanager
async def known(stack: Stack, worker: ScriptedWorker, lease_s: int = 2, key: str = "") -> AsyncIterator[GatewayAnnouncer]:
    """Registered as a worker registers itself; whoever leaves the block says nothing more."""
    announcer = GatewayAnnouncer(stack.grpc_address, member(worker), lease_s, TlsSettings(), lambda: key)
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def start(stack_of: Callable[..., Any]) -> Callable[..., Any]:
    """A gateway that knows nobody, and workers that it has not heard of."""

    async def make(*roles: str, **settings: Any) -> tuple[Stack, list[ScriptedWorker]]:
        seed: Stack = await stack_of(plain=1)  # for its words and what its workers share
        stack: Stack = await stack_of(**(EMPTY | settings))
        shared = seed.workers[0].shared
        started = []
        for number, role in enumerate(roles):
            one = ScriptedWorker(role, shared, f"{role}-{number}", vocab_size=stack.tokenizer.vocab_size)
            started.append(await one.start())
        stack.workers.extend(started)
        return stack, started

    return make


def addresses(stack: Stack) -> set[str]:
    return {worker.address for worker in stack.gateway.fleet.workers}


async def serving(stack: Stack) -> bool:
    answer = await health_pb2_grpc.HealthStub(stack.channel).Check(health_pb2.HealthCheckRequest())  # type: ignore[misc]
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


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


# --- operators


@pytest.fixture
async def admin(start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A stack and calls of its Fleet service with the right key."""

    async def make(*roles: str, **settings: Any) -> tuple[Stack, list[ScriptedWorker], Callable[..., Any]]:
        keys = tmp_path / "keys"
        keys.write_text(f"{RECORD.line()}\n{CLIENT_RECORD.line()}\n")
        stack, workers = await start(*roles, api_key_file=keys, **settings)
        stack.key = CLIENT
        stub = fleet_pb2_grpc.FleetStub(stack.channel)

        async def call(name: str, request: Any) -> Any:
            return await getattr(stub, name)(request, metadata=shown(ADMIN))

        return stack, workers, call

    return make


async def test_an_operator_adds_lists_and_removes(admin: Callable[..., Any]) -> None:
    stack, (plain, prefill, decode), call = await admin("plain", "prefill", "decode")
    for worker in (plain, prefill, decode):
        await call("Add", fleet_pb2.AddWorkerRequest(role=ROLES[worker.role], address=worker.address))
    await eventually(lambda: len(stack.gateway.fleet.routes) == 2)
    listed = await call("List", fleet_pb2.ListWorkersRequest())
    assert listed.ready
    assert listed.gateway_id == "gateway-test"
    assert [(one.address, list(one.sources), one.connected, one.unusable_because) for one in listed.workers] == [
        (worker.address, ["added"], True, "") for worker in (decode, plain, prefill)
    ]
    assert listed.workers[1].info.load.total_pages == 64
    await call("Remove", fleet_pb2.RemoveWorkerRequest(worker=WorkerName(instance_id=decode.instance_id)))
    await call("Remove", fleet_pb2.RemoveWorkerRequest(worker=WorkerName(address=prefill.address)))
    await eventually(lambda: addresses(stack) == {plain.address})
    assert (await stack.reply()).last.report.decode_instance == plain.instance_id


async def test_a_drained_server_gets_no_new_rooms_and_keeps_those_that_it_has(admin: Callable[..., Any]) -> None:
    stack, workers, call = await admin("plain", "plain")
    draining, other = workers
    draining.script = other.script = silence
    async with contextlib.AsyncExitStack() as exits:
        for worker in workers:
            await exits.enter_async_context(known(stack, worker))
        await eventually(lambda: len(stack.gateway.fleet.routes) == 2)
        calls = [stack.call() for _ in range(2)]
        await eventually(lambda: len(draining.starts) == len(other.starts) == 1)
        answer = await call("Drain", fleet_pb2.DrainWorkerRequest(worker=WorkerName(instance_id=draining.instance_id)))
        assert answer.rooms == 1
        await eventually(lambda: draining.drains == 1)
        draining.report(worker_pb2.Report(draining=True))
        await eventually(lambda: len(stack.gateway.fleet.routes) == 1)
        calls += [stack.call() for _ in range(3)]
        await eventually(lambda: len(other.starts) == 4)
        assert len(draining.starts) == 1
        place = stack.gateway.discovery.places.find(draining.address)
        assert place is not None
        assert place.num_rooms == 1
        for one in calls:
            one.cancel()


async def test_removed_now_ends_its_rooms_and_they_go_on_elsewhere(admin: Callable[..., Any]) -> None:
    stack, (first, second), call = await admin("plain", "plain")
    async with known(stack, first), known(stack, second):
        await eventually(lambda: len(stack.gateway.fleet.routes) == 2)
        first.script = second.script = silence
        answer = asyncio.create_task(stack.reply())
        await eventually(lambda: len(first.starts) + len(second.starts) == 1)
        busy, idle = (first, second) if first.starts else (second, first)
        idle.script = by_the_book
        await call("Remove", fleet_pb2.RemoveWorkerRequest(worker=WorkerName(instance_id=busy.instance_id), now=True))
        reply = await answer
        assert reply.last.report.decode_instance == idle.instance_id
        assert "an operator removed it" in reply.last.report.failed_attempts[0].failure.message
        await eventually(lambda: addresses(stack) == {idle.address})
        await eventually(lambda: stack.gateway.discovery.places.counters["joined", "plain"] == 2)
        # It is alive and registers on: it stays away.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet_pb2_grpc.RegistryStub(stack.channel).Register(fleet_pb2.RegisterRequest(member=member(busy), lease_s=10))
        assert "removed from this gateway by an operator" in str(caught.value.details())
        assert addresses(stack) == {idle.address}


async def test_what_an_operator_cannot_do(admin: Callable[..., Any]) -> None:
    stack, (worker,), call = await admin("plain")
    await call("Add", fleet_pb2.AddWorkerRequest(role=ROLES["plain"], address=worker.address))
    await stack.ready()
    cases = [
        (
            "Add",
            fleet_pb2.AddWorkerRequest(role=ROLES["decode"], address=worker.address),
            "FAILED_PRECONDITION",
            "as a plain server: remove it first",
        ),
        ("Add", fleet_pb2.AddWorkerRequest(role=ROLES["plain"], address="x"), "INVALID_ARGUMENT", "address='x'"),
        ("Add", fleet_pb2.AddWorkerRequest(address="x:1"), "INVALID_ARGUMENT", "role=0"),
        ("Drain", fleet_pb2.DrainWorkerRequest(worker=WorkerName(instance_id="x")), "NOT_FOUND", f"plain-0 at {worker.address}"),
        ("Remove", fleet_pb2.RemoveWorkerRequest(), "NOT_FOUND", "no worker ''"),
    ]
    for name, request, code, words in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(name, request)
        assert caught.value.code().name == code
        assert words in str(caught.value.details())


async def test_only_operators_see_and_change_the_fleet(admin: Callable[..., Any], stack_of: Callable[..., Any]) -> None:
    guarded, _, _ = await admin()
    open_to_all: Stack = await stack_of(plain=1)  # neither keys nor registration
    cases = [
        (guarded, (), grpc.StatusCode.UNAUTHENTICATED),
        (guarded, shown("baton-0123"), grpc.StatusCode.UNAUTHENTICATED),
        (guarded, shown(CLIENT), grpc.StatusCode.PERMISSION_DENIED),
        (open_to_all, (), grpc.StatusCode.PERMISSION_DENIED),
        (open_to_all, shown(ADMIN), grpc.StatusCode.PERMISSION_DENIED),
    ]
    questions = {
        "List": fleet_pb2.ListWorkersRequest(),
        "Add": fleet_pb2.AddWorkerRequest(role=ROLES["plain"], address="h:1"),
        "Drain": fleet_pb2.DrainWorkerRequest(worker=WorkerName(instance_id="plain-0")),
        "Remove": fleet_pb2.RemoveWorkerRequest(worker=WorkerName(instance_id="plain-0")),
    }
    for stack, metadata, code in cases:
        before = addresses(stack)
        for name, question in questions.items():
            if name == "List" and stack is open_to_all:
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(fleet_pb2_grpc.FleetStub(stack.channel), name)(question, metadata=metadata)
            assert caught.value.code() is code
        assert addresses(stack) == before
    assert "`baton key new --role admin --file KEYS`" in str(caught.value.details()), "what the last one, of the gateway without keys, is to do"
    for metadata in ((), shown(ADMIN)):  # where no keys are asked for, everybody may look
        seen = await fleet_pb2_grpc.FleetStub(open_to_all.channel).List(fleet_pb2.ListWorkersRequest(), metadata=metadata)
        assert [worker.address for worker in seen.workers] == [open_to_all.workers[0].address]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet_pb2_grpc.RegistryStub(open_to_all.channel).Register(fleet_pb2.RegisterRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
