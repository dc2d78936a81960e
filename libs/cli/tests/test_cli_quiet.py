"""What gRPC's core has to say of its own stays out of an answer on the terminal."""

import os
import re
import subprocess
import sys

import pytest

#: A server that stops in mid-call: the core tells of the GOAWAY.
PROGRAM = """
import asyncio
import baton.cli.main
import grpc
from baton.servicekit import GrpcServer
from grpc_health.v1 import health_pb2, health_pb2_grpc

async def main():
    server = GrpcServer("127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await call.read()
        await server.stop(0)
        await asyncio.sleep(0.3)

asyncio.run(main())
"""


@pytest.mark.parametrize(("asked", "heard"), [(None, False), ("DEBUG", True)])
def test_the_core_is_quiet_unless_asked(asked: str | None, heard: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"} | ({"GRPC_VERBOSITY": asked} if asked else {})
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True)
    of_the_core = [line for line in ended.stderr.splitlines() if re.match(r"[IWEF]\d{4} \d\d:", line)]
    assert bool(of_the_core) is heard, ended.stderr
