"""Workers that register with a gateway by the workers' own client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway_harness import Stack, member
from gateway_worker import ScriptedWorker
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.servicekit import TlsSettings
from baton.workerkit.joining.gateway import GatewayAnnouncer

KEY = "a-key-that-is-long-enough"


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


def addresses(stack: Stack) -> set[str]:
    return {worker.address for worker in stack.gateway.fleet.workers}


async def serving(stack: Stack) -> bool:
    answer = await health_pb2_grpc.HealthStub(stack.channel).Check(health_pb2.HealthCheckRequest())  # type: ignore[misc]
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
