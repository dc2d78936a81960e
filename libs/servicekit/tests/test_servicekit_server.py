from __future__ import annotations

import asyncio
import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.servicekit import AddressUnavailableError, GrpcServer, TlsError, TlsSettings, join_address, open_channel

OPTIONS = [("grpc.so_reuseport", 0)]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def status(channel: grpc.aio.Channel, service: str = "") -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return int(reply.status)


async def test_health_goes_from_not_serving_to_serving_to_drained() -> None:
    server = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        assert await status(channel) == NOT_SERVING
        await server.set_serving(True)
        assert await status(channel) == SERVING
        await server.drain()
        assert await status(channel) == NOT_SERVING
        await server.set_serving(True)
        assert await status(channel) == NOT_SERVING
    await server.stop()
    await server.stop()


async def test_calls_that_have_arrived_are_answered_before_it_stops() -> None:
    """A loop that was busy has not begun them: gRPC's core would cancel all but one of them."""
    server = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        await status(channel)  # it is connected
        calls = [asyncio.ensure_future(status(channel)) for _ in range(30)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251
        await server.stop(1.0)
        assert await asyncio.gather(*calls) == [NOT_SERVING] * 30


async def test_clients_that_keep_calling_are_not_cancelled_when_it_stops() -> None:
    server = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    await server.start()
    ends: list[grpc.StatusCode] = []

    async def client() -> None:
        async with grpc.aio.insecure_channel(server.address) as channel:
            while True:
                try:
                    await status(channel)
                except grpc.aio.AioRpcError as error:
                    ends.append(error.code())
                    return

    async def busy() -> None:
        while True:
            time.sleep(0.002)  # noqa: ASYNC251
            await asyncio.sleep(0)

    clients, others = [asyncio.create_task(client()) for _ in range(40)], asyncio.create_task(busy())
    await asyncio.sleep(1.0)
    await server.stop(1.0)
    await asyncio.gather(*clients)
    others.cancel()
    assert ends == [grpc.StatusCode.UNAVAILABLE] * 40


async def test_calls_that_a_slow_loop_has_not_begun_are_not_cancelled_when_it_stops() -> None:
    """Each takes several turns of the loop to begin, so that none begins for longer than a moment, and yet many have arrived."""
    server = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    await server.start()
    ends: list[grpc.StatusCode] = []

    def client(number: int) -> None:
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
                except grpc.RpcError as error:
                    ends.append(error.code())
                    return
                time.sleep(0.01 * number)

    async def busy() -> None:
        while True:
            time.sleep(0.01)  # noqa: ASYNC251
            await asyncio.sleep(0)

    with ThreadPoolExecutor(32) as threads:
        clients = [asyncio.wrap_future(threads.submit(client, number)) for number in range(32)]
        others = asyncio.create_task(busy())
        await asyncio.sleep(1.5)
        await server.stop(1.0)
        others.cancel()
        await asyncio.gather(*clients)
    assert ends == [grpc.StatusCode.UNAVAILABLE] * 32


async def test_a_stop_that_is_cancelled_keeps_nobody_waiting() -> None:
    """As by a second signal while calls still come."""
    server = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        await status(channel)  # it is connected
        stopping = asyncio.create_task(server.stop(1.0))
        await asyncio.sleep(0)
        call = asyncio.create_task(status(channel))
        await asyncio.sleep(0.1)
        assert not call.done()
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        assert await call == NOT_SERVING
    await server.stop()


async def test_who_watches_is_told_before_it_stops() -> None:
    server = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    await server.start()
    await server.set_serving(True)
    async with grpc.aio.insecure_channel(server.address) as channel:
        told = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=5))
        assert (await anext(told)).status == SERVING
        _, last = await asyncio.gather(server.stop(1.0), anext(told))
        assert last.status == NOT_SERVING


async def test_reflection_lists_what_was_added() -> None:
    server = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    server.add(lambda servicer, server: None, object(), "made.up.Service")
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {service.name async for reply in call for service in reply.list_services_response.service}
        assert await status(channel, "made.up.Service") == NOT_SERVING
    await server.stop()
    assert {"made.up.Service", "grpc.health.v1.Health"} <= names


async def test_one_that_is_dropped_without_a_stop_is_gone() -> None:
    """gRPC shuts a running server down when nothing holds it any more: a cycle would."""
    server = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    await server.start()
    inner = weakref.ref(server._server)
    gc.disable()
    try:
        del server
        assert inner() is None
    finally:
        gc.enable()
    await asyncio.sleep(0.1)  # its shutdown is a task of this loop


async def test_a_taken_address_is_named() -> None:
    first = GrpcServer("127.0.0.1", 0, options=OPTIONS)
    port = await first.start()
    second = GrpcServer("127.0.0.1", port, options=OPTIONS, port_flag="--bootstrap-port")
    with pytest.raises(AddressUnavailableError, match=f"127.0.0.1:{port}: the address is in use .* another --host or --bootstrap-port$"):
        await second.start()
    await first.stop()
    await second.stop()


async def test_mutual_tls_from_files(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    ours = write(tmp_path, "ours", authority, authority)
    theirs = write(tmp_path, "theirs", stranger, authority)
    server = GrpcServer("localhost", 0, tls=ours, options=OPTIONS)
    await server.start()
    async with open_channel(server.address, ours) as channel:
        assert await status(channel) == NOT_SERVING
    for tls in (theirs, TlsSettings(ca_file=ours.ca_file), TlsSettings()):  # a stranger's certificate, none, plain text
        async with open_channel(server.address, tls) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop()


async def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    tls = TlsSettings(cert_file=tmp_path / "none.pem", key_file=tmp_path / "none.key")
    server = GrpcServer("127.0.0.1", 0, tls=tls, options=OPTIONS)
    with pytest.raises(TlsError, match=r"--tls-key-file='.*none.key'"):
        await server.start()
    await server.stop()


def test_addresses() -> None:
    assert join_address("127.0.0.1", 1) == "127.0.0.1:1"
    assert join_address("::1", 1) == "[::1]:1"
    assert join_address("[::1]", 1) == "[::1]:1"


def write(folder: Path, name: str, signer: trustme.CA, trusted: trustme.CA) -> TlsSettings:
    certificate = signer.issue_cert("localhost")
    cert_file, key_file, ca_file = (folder / f"{name}.{kind}.pem" for kind in ("cert", "key", "ca"))
    cert_file.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key_file.write_bytes(certificate.private_key_pem.bytes())
    ca_file.write_bytes(trusted.cert_pem.bytes())
    return TlsSettings(cert_file=cert_file, key_file=key_file, ca_file=ca_file)
