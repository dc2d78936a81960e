"""What is said of a worker whose session ended."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from baton.gateway.worker import Leg, Worker
from baton.gateway.worker_session import WorkerSession
from baton.servicekit import TlsSettings


@pytest.mark.parametrize("was_connected", [False, True])
async def test_only_a_session_that_never_was_may_have_been_refused_for_its_certificate(was_connected: bool) -> None:
    worker = Worker("127.0.0.1:1", Leg.PREFILL, min_vocab_size=1, stall_limit_s=1.0)
    worker.connected = was_connected
    session = WorkerSession(worker, gateway_id="g", gateway_address="127.0.0.1:2", tls=TlsSettings(), silence_limit_s=1.0)
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details="Stream removed (Socket closed)")
    said = session._explain(error)
    assert said.startswith("UNAVAILABLE: Stream removed (Socket closed)")
    assert ("--tls-ca-file" in said) is not was_connected
