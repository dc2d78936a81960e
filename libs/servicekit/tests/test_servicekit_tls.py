"""TLS from files that change while a service runs, over real connections with certificates of a CA made here."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ssl
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.servicekit import GrpcServer, TlsError, TlsFiles, TlsSettings, open_channel
from baton.servicekit.tls import explain_refusal

OPTIONS = [("grpc.so_reuseport", 0)]
NOW = datetime.datetime.now(datetime.UTC)
YESTERDAY, LAST_YEAR = NOW - datetime.timedelta(days=1), NOW - datetime.timedelta(days=365)


class Folder:
    """One side's files."""

    def __init__(self, path: Path, signer: trustme.CA, trusted: trustme.CA | None = None, **times: datetime.datetime) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.put(signer, trusted, **times)

    def put(self, signer: trustme.CA, trusted: trustme.CA | None = None, **times: datetime.datetime) -> None:
        self.certificate = signer.issue_cert("localhost", "127.0.0.1", **times)
        self.put_certificate()
        self.put_key()
        if trusted is not None:
            (self.path / "ca.pem").write_bytes(trusted.cert_pem.bytes())

    def put_certificate(self) -> None:
        (self.path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in self.certificate.cert_chain_pems))

    def put_key(self) -> None:
        (self.path / "key.pem").write_bytes(self.certificate.private_key_pem.bytes())

    @property
    def settings(self) -> TlsSettings:
        ca = self.path / "ca.pem"
        return TlsSettings(cert_file=self.path / "cert.pem", key_file=self.path / "key.pem", ca_file=ca if ca.exists() else None)


async def ask(address: str, tls: TlsSettings) -> str:
    """ "served", or why not."""
    async with open_channel(address, tls, OPTIONS) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return explain_refusal(error.details() or "", tls)
    return "served"


def settle(files: TlsFiles) -> bool:
    files.refresh()
    return files.refresh()


@pytest.fixture
def authorities() -> tuple[trustme.CA, trustme.CA]:
    return trustme.CA(), trustme.CA()


async def test_new_files_are_served_to_new_connections_while_old_ones_live(tmp_path: Path, authorities) -> None:
    """All of it at once: another CA has signed both sides, and the earlier one is no longer believed."""
    old, new = authorities
    server_files, client = Folder(tmp_path / "server", old, old), Folder(tmp_path / "client", old, old)
    files = TlsFiles(server_files.settings)
    server = GrpcServer("localhost", 0, tls=files, options=OPTIONS)
    await server.start()
    assert await ask(server.address, client.settings) == "served"
    async with open_channel(server.address, client.settings, OPTIONS) as lasting:
        stub = health_pb2_grpc.HealthStub(lasting)
        await stub.Check(health_pb2.HealthCheckRequest())
        server_files.put(new, new)
        assert settle(files)
        assert "--tls-ca-file did not sign it" in await ask(server.address, client.settings)
        client.put(new, new)
        assert await ask(server.address, client.settings) == "served"
        await stub.Check(health_pb2.HealthCheckRequest())
    assert files.counters["reloaded"] == 1
    await server.stop()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder, ca: (folder.path / "cert.pem").write_bytes((folder.path / "cert.pem").read_bytes()[:300]), "holds no PEM certificate"),
        (lambda folder, ca: (folder.path / "key.pem").write_text("-----BEGIN"), "holds no PEM private key"),
        (lambda folder, ca: (folder.path / "key.pem").unlink(), "No such file"),
        (lambda folder, ca: (folder.path / "ca.pem").write_text(""), "--tls-ca-file=.* holds no PEM certificate"),
        (lambda folder, ca: folder.put(ca, not_before=LAST_YEAR, not_after=YESTERDAY), "has expired at"),
        (lambda folder, ca: folder.put(ca, not_before=NOW + datetime.timedelta(days=1)), "valid from .* yet to come"),
    ],
)
async def test_files_that_cannot_be_used_leave_the_old_ones_in_force(tmp_path: Path, authorities, spoil, why: str) -> None:
    ca, _ = authorities
    folder, client = Folder(tmp_path / "server", ca, ca), Folder(tmp_path / "client", ca, ca)
    files = TlsFiles(folder.settings)
    server = GrpcServer("localhost", 0, tls=files, options=OPTIONS)
    await server.start()
    settings = folder.settings
    spoil(folder, ca)
    assert not settle(files)
    assert files.counters == {"reload_failed": 1}
    assert await ask(server.address, client.settings) == "served"
    with pytest.raises(TlsError, match=why):  # at a start there is nothing to fall back to
        TlsFiles(settings)
    await server.stop()


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
def test_whatever_is_damaged_in_a_file_is_said_of_the_file(tmp_path: Path, authorities, name: str) -> None:
    """A byte that is not what it was: a key of no kind that there is, a point on no curve, a version that X.509 has not. Anything but a TlsError
    would end the service that reads it again."""
    ca, _ = authorities
    folder = Folder(tmp_path, ca, ca)
    settings, problems = folder.settings, set()
    first, *lines, last = (tmp_path / name).read_text().strip().split("\n")
    sound = base64.b64decode("".join(lines))
    for place in range(0, len(sound), 3):
        damaged = sound[:place] + bytes((sound[place] ^ 0x15,)) + sound[place + 1 :]
        (tmp_path / name).write_text("\n".join([first, base64.encodebytes(damaged).decode().strip(), last, ""]))
        try:
            TlsFiles(settings)
        except TlsError as error:
            problems.add(str(error))
    assert problems


async def test_a_certificate_that_comes_before_its_key_waits_for_it(tmp_path: Path, authorities) -> None:
    ca, _ = authorities
    folder, client = Folder(tmp_path / "server", ca, ca), Folder(tmp_path / "client", ca, ca)
    files = TlsFiles(folder.settings)
    server = GrpcServer("localhost", 0, tls=files, options=OPTIONS)
    await server.start()
    folder.certificate = ca.issue_cert("localhost")
    folder.put_certificate()
    assert not settle(files)
    assert "is not the key of the certificate" in files._files.problem
    assert await ask(server.address, client.settings) == "served"
    folder.put_key()
    assert settle(files)
    assert await ask(server.address, client.settings) == "served"
    assert files.counters == {"reload_failed": 1, "reloaded": 1}
    await server.stop()


async def test_wrong_missing_and_expired_client_certificates_are_refused(tmp_path: Path, authorities) -> None:
    ca, stranger = authorities
    server = GrpcServer("localhost", 0, tls=TlsFiles(Folder(tmp_path / "server", ca, ca).settings), options=OPTIONS)
    await server.start()
    good = Folder(tmp_path / "good", ca, ca).settings
    assert await ask(server.address, good) == "served"
    wrong = Folder(tmp_path / "wrong", stranger, ca).settings
    for tls in (wrong, TlsSettings(ca_file=good.ca_file)):
        assert "may have refused our certificate" in await ask(server.address, tls)
    assert "it may demand TLS: set --tls-ca-file here" in await ask(server.address, TlsSettings())
    expired = Folder(tmp_path / "expired", ca, ca, not_before=LAST_YEAR, not_after=YESTERDAY).settings
    with pytest.raises(TlsError, match="has expired"):  # our own side does not even try
        await ask(server.address, expired)
    pem = {name: getattr(expired, f"{name}_file").read_bytes() for name in ("ca", "cert", "key")}
    credentials = grpc.ssl_channel_credentials(pem["ca"], pem["key"], pem["cert"])
    async with grpc.aio.secure_channel(server.address, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    await server.stop()


async def test_a_server_with_a_wrong_certificate_is_refused_by_name(tmp_path: Path, authorities) -> None:
    ca, stranger = authorities
    server = GrpcServer("localhost", 0, tls=Folder(tmp_path / "server", stranger).settings, options=OPTIONS)
    await server.start()
    assert "the other side's certificate is refused" in await ask(server.address, Folder(tmp_path / "client", ca, ca).settings)
    await server.stop()
    plain = GrpcServer("localhost", 0, options=OPTIONS)
    await plain.start()
    assert "the other side speaks plain text" in await ask(plain.address, Folder(tmp_path / "client", ca, ca).settings)
    await plain.stop()


@pytest.fixture
async def https(tmp_path: Path, authorities):
    """A port of asyncio's with mutual TLS: (files, folder, port)."""
    folder = Folder(tmp_path / "server", authorities[0], authorities[0])
    files = TlsFiles(folder.settings)

    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=files.server_context())
    yield files, folder, server.sockets[0].getsockname()[1]
    server.close()


async def talk(port: int, trusted: trustme.CA, certificate: trustme.LeafCert | None) -> bytes:
    context = ssl.create_default_context()
    trusted.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await reader.read()
    except OSError:  # with TLS 1.3 a client learns of its refusal when it reads
        return b""
    finally:
        writer.close()


async def test_https_clients_are_refused_by_name_and_counted(https, authorities) -> None:
    files, _, port = https
    ca, stranger = authorities
    assert await talk(port, ca, ca.issue_cert("client")) == b"hello"
    refused = {
        "unable to get local issuer certificate": stranger.issue_cert("client"),
        "certificate has expired": ca.issue_cert("client", not_before=LAST_YEAR, not_after=YESTERDAY),
        "peer did not return a certificate": None,
    }
    for certificate in refused.values():
        assert await talk(port, ca, certificate) == b""
    async with asyncio.timeout(10):
        while sum(files.counters.values()) < 3:  # noqa: ASYNC110 # the server's half of a handshake has no event here
            await asyncio.sleep(0.01)
    assert files.counters == {f"refused/{reason}": 1 for reason in refused}


async def test_https_takes_new_files_and_drops_the_authority_that_is_gone(https, authorities) -> None:
    files, folder, port = https
    old, new = authorities
    folder.put(new, new)
    assert settle(files)
    assert await talk(port, new, new.issue_cert("client")) == b"hello"
    assert await talk(port, new, old.issue_cert("client")) == b""


async def test_an_end_that_is_near_is_said(tmp_path: Path, authorities, capsys: pytest.CaptureFixture[str]) -> None:
    soon = NOW + datetime.timedelta(days=2)
    files = TlsFiles(Folder(tmp_path / "server", authorities[0], not_after=soon).settings)
    clock = asyncio.create_task(files.run(0.01))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    clock.cancel()
    await asyncio.gather(clock, return_exceptions=True)
    assert "the TLS certificate ends soon" in capsys.readouterr().out
