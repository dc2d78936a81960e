"""Gateways that share a fleet through a real etcd: what happens to it when workers, and etcd, come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from gateway_etcd import EtcdServer
from gateway_harness import Stack, eventually, member, rest
from gateway_worker import ScriptedWorker, by_the_book

from baton.servicekit import TlsSettings
from baton.servicekit.errors import EtcdError
from baton.servicekit.etcd import Change, EtcdEndpoint, Snapshot, open_etcd, parse_endpoint
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import worker_pb2
from baton.workerkit.joining.etcd import EtcdAnnouncer

PREFIX = "/tests"
LEASE_S = 2


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    try:
        yield server.start()
    finally:
        server.close()


@contextlib.asynccontextmanager
async def known(etcd: EtcdServer, worker: ScriptedWorker) -> AsyncIterator[EtcdAnnouncer]:
    """In etcd as a worker puts itself there; whoever leaves the block keeps its lease no more."""
    announcer = EtcdAnnouncer([parse_endpoint(etcd.endpoint)], PREFIX, member(worker), LEASE_S, TlsSettings())
    task = asyncio.create_task(announcer.run())
    try:
        yield announcer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def gateways(stack_of: Callable[..., Any], etcd: EtcdServer) -> Callable[..., Any]:
    """Two gateways that know nothing but etcd (the first of their endpoints is dead), and workers that they have not heard of."""

    async def make(*roles: str, **settings: Any) -> tuple[list[Stack], list[ScriptedWorker]]:
        seed: Stack = await stack_of(plain=1)
        about = {"prefill": 0, "decode": 0, "wait_ready": False, "etcd": ("127.0.0.1:9", etcd.endpoint), "etcd_prefix": PREFIX}
        stacks: list[Stack] = [await stack_of(**(about | settings)) for _ in range(2)]
        workers = []
        for number, role in enumerate(roles):
            one = ScriptedWorker(role, seed.workers[0].shared, f"{role}-{number}", vocab_size=seed.tokenizer.vocab_size)
            workers.append(await one.start())
        seed.workers.extend(workers)  # ended with it
        return stacks, workers

    return make


async def everywhere(stacks: list[Stack], true: Callable[[Stack], bool], timeout_s: float = 20.0) -> None:
    for stack in stacks:
        await eventually(lambda stack=stack: true(stack), timeout_s)


def counters(stacks: list[Stack]) -> list[dict[tuple[str, str], int]]:
    return [dict(stack.gateway.discovery.places.counters) for stack in stacks]


def problems(stack: Stack) -> str:
    return "; ".join(stack.gateway.fleet.problems())


async def test_every_gateway_sees_who_comes_and_who_goes(gateways: Callable[..., Any], etcd: EtcdServer) -> None:
    stacks, (prefill, decode, plain) = await gateways("prefill", "decode", "plain")
    async with known(etcd, prefill) as leaving, known(etcd, decode), known(etcd, plain):
        await everywhere(stacks, lambda stack: len(stack.gateway.fleet.routes) == 2)
        for stack in stacks:
            assert {(await stack.reply()).last.report.decode_instance for _ in range(2)} == {"decode-1", "plain-2"}
        await leaving.leave()  # a worker that stops also says so on its session, and that may come first or last
        await everywhere(stacks, lambda stack: "prefill-0 is not in etcd any more" in problems(stack))
        prefill.report(worker_pb2.Report(draining=True))
        await everywhere(stacks, lambda stack: {worker.leg.value for worker in stack.gateway.fleet.workers} == {"decode", "plain"})
        assert all(problems(stack) == "" for stack in stacks)


async def test_a_killed_worker_is_dropped_when_its_lease_ends_and_its_successor_serves(gateways: Callable[..., Any], etcd: EtcdServer) -> None:
    stacks, (worker,) = await gateways("plain")
    async with known(etcd, worker):
        await everywhere(stacks, lambda stack: stack.gateway.fleet.ready)
        await worker.kill()
        await everywhere(stacks, lambda stack: not stack.gateway.fleet.ready)
    await everywhere(stacks, lambda stack: not stack.gateway.fleet.workers)  # its lease has ended
    successor = await worker.successor().start()
    try:
        async with known(etcd, successor):
            await everywhere(stacks, lambda stack: stack.gateway.fleet.ready)
            assert (await stacks[1].reply()).last.report.decode_instance == successor.instance_id
    finally:
        await successor.kill()


async def test_etcd_dies_and_comes_back_and_the_fleet_serves_all_the_while(gateways: Callable[..., Any], etcd: EtcdServer) -> None:
    stacks, (prefill, decode, plain) = await gateways("prefill", "decode", "plain")
    go_on = asyncio.Event()

    async def slow(one: ScriptedWorker, begun: worker_pb2.Start) -> None:
        await go_on.wait()
        await by_the_book(one, begun)

    decode.script = slow
    async with known(etcd, prefill), known(etcd, decode):
        await everywhere(stacks, lambda stack: stack.gateway.fleet.ready)
        call = stacks[0].call()
        await decode.next_start()
        etcd.kill()
        await everywhere(stacks, lambda stack: "the fleet is as it was last known" in problems(stack))
        await asyncio.sleep(LEASE_S + 1)  # longer than any lease: only a clock can show it
        assert all(stack.gateway.fleet.ready for stack in stacks)
        decode.script = by_the_book
        assert (await stacks[1].reply()).last.report.decode_instance == "decode-1"
        etcd.start()
        await everywhere(stacks, lambda stack: problems(stack) == "")
        async with known(etcd, plain):
            await everywhere(stacks, lambda stack: len(stack.gateway.fleet.routes) == 2)
            await asyncio.sleep(LEASE_S + 1)  # the leases are kept again
            assert counters(stacks) == [{("joined", "prefill"): 1, ("joined", "decode"): 1, ("joined", "plain"): 1}] * 2
        go_on.set()
        assert (await rest(call))[-1].finish_reason


async def test_an_etcd_that_lost_its_data_does_not_empty_the_fleet(gateways: Callable[..., Any], etcd: EtcdServer) -> None:
    """Who lives registers again; who does not is let go when the grace is over."""
    stacks, (living, silent) = await gateways("plain", "plain", etcd_grace_s=4.0)
    async with known(etcd, living):
        async with known(etcd, silent):
            await everywhere(stacks, lambda stack: len(stack.gateway.fleet.routes) == 2)
            etcd.kill()
        etcd.wipe()
        etcd.start()
        await everywhere(stacks, lambda stack: f"{silent.instance_id} is not in etcd any more" in problems(stack))
        assert all(len(stack.gateway.fleet.routes) == 2 for stack in stacks)
        await everywhere(stacks, lambda stack: [worker.instance_id for worker in stack.gateway.fleet.workers] == [living.instance_id])
        assert counters(stacks) == [{("joined", "plain"): 2, ("left", "plain"): 1, ("removed", "plain"): 1}] * 2
        assert all(problems(stack) == "" for stack in stacks)


async def test_an_etcd_that_stood_still_drops_nobody_who_lives(gateways: Callable[..., Any], etcd: EtcdServer) -> None:
    """Frozen for longer than the leases, it ends them on waking, before it hears that they are kept."""
    stacks, (worker,) = await gateways("plain")
    async with known(etcd, worker) as announcer:
        await everywhere(stacks, lambda stack: stack.gateway.fleet.ready)
        lease = announcer._lease
        etcd.freeze()
        await asyncio.sleep(2 * LEASE_S + 1)
        etcd.thaw()
        await eventually(lambda: announcer._lease not in (None, lease), 20.0)  # it was lost, and there is a new one
        await everywhere(stacks, lambda stack: problems(stack) == "")
        assert counters(stacks) == [{("joined", "plain"): 1}] * 2
        assert (await stacks[0].reply()).last.report.decode_instance == worker.instance_id


async def test_members_that_are_none_of_ours(gateways: Callable[..., Any], etcd: EtcdServer) -> None:
    stacks, (worker,) = await gateways("plain")
    async with open_etcd(parse_endpoint(etcd.endpoint), TlsSettings(), CHANNEL_OPTIONS) as connection:
        lease = await connection.grant(60)
        await connection.put(b"/tests/members/rubbish", b"\xff{", lease)
        await connection.put(b"/tests/members/big", b'{"instanceId":"big","role":"ROLE_PLAIN","address":"h:1","model":"big"}', lease)
        await connection.put(b"/testsmore/members/x", b'{"instanceId":"x","role":"ROLE_PLAIN","address":"h:2","model":"tiny"}', lease)
    await everywhere(stacks, lambda stack: "etcd key /tests/members/rubbish: it is no member" in problems(stack))
    await everywhere(stacks, lambda stack: "1 servers of other models (big) and none of 'tiny'" in problems(stack))
    assert not any(stack.gateway.fleet.workers for stack in stacks)
    async with known(etcd, worker):
        await everywhere(stacks, lambda stack: stack.gateway.fleet.ready)


# --- the client alone


async def test_a_watch_tells_every_change_and_ends_when_it_cannot(etcd: EtcdServer) -> None:
    async with open_etcd(parse_endpoint(etcd.endpoint), TlsSettings(), CHANNEL_OPTIONS) as connection:
        before = await connection.snapshot(b"/a/")
        lease = await connection.grant(LEASE_S)
        await connection.put(b"/a/1", b"x", lease)
        await connection.put(b"/b/1", b"y", lease)
        changes = connection.watch(b"/a/", before)
        assert await anext(changes) == [Change(b"/a/1", b"x")]
        assert (await connection.snapshot(b"/a/")).values == {b"/a/1": b"x"}
        await connection.revoke(lease)
        assert await anext(changes) == [Change(b"/a/1", None)]
        etcd.kill()
        with pytest.raises(EtcdError):
            await anext(changes)
        with pytest.raises(EtcdError):
            await connection.snapshot(b"/a/")


async def test_a_watch_from_before_a_compaction_is_refused(etcd: EtcdServer) -> None:
    from aetcd import rpc

    async with open_etcd(parse_endpoint(etcd.endpoint), TlsSettings(), CHANNEL_OPTIONS) as connection:
        lease = await connection.grant(60)
        for number in range(5):
            await connection.put(b"/a/1", b"%d" % number, lease)
        now = await connection.snapshot(b"/a/")
        await connection._kv.Compact(rpc.CompactionRequest(revision=now.revision))
        with pytest.raises(EtcdError, match=f"no longer has the changes before revision {now.revision}"):
            await anext(connection.watch(b"/a/", Snapshot(1, {})))


async def test_an_etcd_that_demands_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    paths = {}
    for name in ("server", "client"):
        issued = authority.issue_cert("127.0.0.1", common_name=name)
        paths[name] = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(paths[name][0])
        issued.private_key_pem.write_to_path(paths[name][1])
    roots = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(roots)
    cert, key = map(str, paths["server"])
    server = EtcdServer(
        tmp_path / "etcd", "--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", str(roots), scheme="https"
    )
    try:
        server.start()
        endpoint = parse_endpoint(server.endpoint)
        assert endpoint == EtcdEndpoint(server.address, encrypted=True)
        with pytest.raises(EtcdError, match="set --tls-ca-file"):
            async with open_etcd(endpoint, TlsSettings()):
                pass
        tls = TlsSettings(cert_file=paths["client"][0], key_file=paths["client"][1], ca_file=roots)
        async with open_etcd(endpoint, tls, CHANNEL_OPTIONS) as connection:
            assert (await connection.snapshot(b"/a/")).values == {}
        async with open_etcd(endpoint, TlsSettings(ca_file=roots), CHANNEL_OPTIONS) as connection:
            with pytest.raises(EtcdError):
                await connection.snapshot(b"/a/")
    finally:
        server.close()


@pytest.mark.parametrize("text", ["", "host", "ftp://h:1", "h:0", "h:70000", ":1", "http://", "https://h"])
def test_an_endpoint_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|scheme"):
        parse_endpoint(text)
