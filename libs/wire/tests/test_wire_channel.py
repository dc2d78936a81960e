"""The options hold what they promise: an idle stream lives, and finds out that its peer has vanished."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from baton.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from baton.wire.v1 import worker_pb2, worker_pb2_grpc

#: Every time in the options is divided by this, so that minutes are seconds.
HASTE = 20


def hasty(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(name, value // HASTE if name.endswith("_ms") else value) for name, value in options]


class Quiet(worker_pb2_grpc.WorkerServicer):
    """Reports once, and then says nothing."""

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.Report]:  # noqa: N802
        yield worker_pb2.Report(draining=True)
        await asyncio.Event().wait()


async def serve() -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=hasty(SERVER_OPTIONS))
    worker_pb2_grpc.add_WorkerServicer_to_server(Quiet(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def test_an_idle_stream_is_not_cut_for_its_keepalive() -> None:
    """Eight keepalive pings without a byte of data: a server that takes them for a flood ends the connection after four."""
    server, port = await serve()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=hasty(CHANNEL_OPTIONS)) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Session()
            await call.write(worker_pb2.Command())
            await call.read()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call.read(), 8 * 10.0 / HASTE + 0.5)
    finally:
        await server.stop(0)


@pytest.fixture
def peer() -> Iterator[tuple[int, int]]:
    """A server in a process of its own: its process id and port."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.kill()
    process.wait()


async def test_a_frozen_peer_is_found_by_keepalive(peer: tuple[int, int]) -> None:
    """SIGSTOP: the connection stays open, nobody answers. The stream ends within keepalive time and timeout."""
    pid, port = peer
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=hasty(CHANNEL_OPTIONS)) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(worker_pb2.Command())
        await call.read()
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 10.0)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 5.0


async def test_a_server_that_is_slow_to_shake_hands_is_connected_to() -> None:
    """As one that hundreds connect to at once: the first bytes take a second to reach it."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(Quiet(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def carry(source: asyncio.StreamReader, into: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            into.write(data)
        into.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.0)
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, to_server), carry(from_server, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as slow:
        address = "{}:{}".format(*slow.sockets[0].getsockname())
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Session()
            await call.write(worker_pb2.Command())
            report = await call.read()
            assert isinstance(report, worker_pb2.Report)
            assert report.draining
            call.cancel()
    await server.stop(0)


async def test_a_call_of_five_seconds_says_that_nobody_could_be_connected_to() -> None:
    """As those to etcd and to registries have: with an attempt as long as the call itself, its end would be a deadline that names nobody."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts for it, and nobody says anything
        address = "{}:{}".format(*silent.getsockname())
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Describe(worker_pb2.DescribeRequest(), timeout=5.0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert address in (caught.value.details() or "")


async def main() -> None:
    server, port = await serve()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())


async def test_a_connection_that_never_begins_its_handshake_is_closed() -> None:
    """Before there is a connection, keepalive does not run."""
    leaf = trustme.CA().issue_cert("localhost")
    pair = (leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes())
    server = grpc.aio.server(options=hasty(SERVER_OPTIONS))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(30):
            assert await reader.read() == b""
    writer.close()
    await server.stop(0)
