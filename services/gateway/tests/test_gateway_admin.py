"""Operators who change the fleet while it serves: a real gateway, scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_harness import Stack, eventually, member
from gateway_registration import addresses, known
from gateway_worker import ROLES, ScriptedWorker, by_the_book, silence

from baton.servicekit import KeyRole, new_key
from baton.wire.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2

ADMIN, RECORD = new_key(KeyRole.ADMIN)
CLIENT, CLIENT_RECORD = new_key(KeyRole.CLIENT)

WorkerName = fleet_pb2.WorkerName


def shown(key: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


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
