"""Clients and services under different authorities: a client's certificate opens the gateway and nothing behind it."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import trustme
from gateway_harness import MODEL, Stack

from baton.gateway.config import GatewaySettings
from baton.servicekit import SettingsError, TlsSettings
from baton.wire.v1 import inference_pb2, inference_pb2_grpc


class Files:
    def __init__(self, folder: Path) -> None:
        self.services, self.clients = trustme.CA(), trustme.CA()
        ours = self.services.issue_cert("localhost", "127.0.0.1")
        self.cert, self.key, self.ca = folder / "cert.pem", folder / "key.pem", folder / "clients.pem"
        self.cert.write_bytes(b"".join(blob.bytes() for blob in ours.cert_chain_pems))
        self.key.write_bytes(ours.private_key_pem.bytes())
        self.ca.write_bytes(self.clients.cert_pem.bytes())

    def tls(self) -> TlsSettings:
        return TlsSettings(cert_file=self.cert, key_file=self.key)

    async def models(self, stack: Stack, shown: trustme.LeafCert | None) -> list[str]:
        """Who answers a client with this certificate, over HTTPS and over gRPC."""
        context = ssl.create_default_context()
        self.services.configure_trust(context)
        pair = (None, None)
        if shown is not None:
            shown.configure_cert(context)
            pair = (shown.private_key_pem.bytes(), b"".join(blob.bytes() for blob in shown.cert_chain_pems))
        answers = []
        async with httpx.AsyncClient(verify=context) as client:
            try:
                answers.append((await client.get(f"https://127.0.0.1:{stack.gateway.http.port}/v1/models")).json()["data"][0]["id"])
            except httpx.TransportError:
                answers.append("refused")
        credentials = grpc.ssl_channel_credentials(self.services.cert_pem.bytes(), *pair)
        async with grpc.aio.secure_channel(f"127.0.0.1:{stack.gateway.grpc.port}", credentials) as channel:
            try:
                reply = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=10)
                answers.append(reply.models[0].id)
            except grpc.aio.AioRpcError:
                answers.append("refused")
        return answers


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_clients_show_certificates_of_their_own_authority(stack_of, files: Files) -> None:
    stack: Stack = await stack_of(tls=files.tls(), client_ca_file=files.ca)
    assert await files.models(stack, files.clients.issue_cert("client")) == [MODEL, MODEL]
    assert await files.models(stack, files.services.issue_cert("a-service")) == ["refused", "refused"]
    assert await files.models(stack, None) == ["refused", "refused"]


async def test_clients_may_be_spared_certificates_where_services_show_theirs(stack_of, files: Files) -> None:
    stack: Stack = await stack_of(tls=files.tls(), client_ca_file=files.ca, client_certificates=False)
    assert await files.models(stack, None) == [MODEL, MODEL]


def test_the_services_authority_signs_clients_unless_another_does(model_folder: Path, files: Files) -> None:
    flags = ["--model-path", str(model_folder), "--plain", "127.0.0.1:1"]
    pair = ["--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key)]
    mutual = [*flags, *pair, "--tls-ca-file", str(files.cert)]
    assert GatewaySettings.load(mutual, {}).front_tls.ca_file == files.cert
    assert GatewaySettings.load([*mutual, "--client-ca-file", str(files.ca)], {}).front_tls.ca_file == files.ca
    spared = GatewaySettings.load([*mutual, "--no-client-certificates"], {})
    assert (spared.front_tls.ca_file, spared.tls.ca_file) == (None, files.cert)
    with pytest.raises(SettingsError, match="--client-ca-file is set and --tls-cert-file is not"):
        GatewaySettings.load([*flags, "--client-ca-file", str(files.ca)], {})
