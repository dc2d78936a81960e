"""A real process that behaves as services do (ready file, health, SIGTERM, parent's death), and badly where it is told to."""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.servicekit import GrpcServer
from baton.servicekit.parent import ParentWatch


def say_ready(file: Path, address: str) -> None:
    record = {"service": "tiny", "instance_id": "tiny-1", "pid": os.getpid(), "addresses": {"grpc": address}}
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    temporary.rename(file)


async def serve(ready_file: Path) -> None:
    """As Baton's own services, from ready to stopped."""
    server, stopping = GrpcServer("127.0.0.1", 0), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await server.start()
    await server.set_serving(True)
    say_ready(ready_file, server.address)
    await stopping.wait()
    await server.stop(1.0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour", choices=["good", "batons-own", "dies", "never-ready", "not-serving", "ignores-term", "has-child"])
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--drain-timeout-s", type=float)
    arguments = parser.parse_args()
    print("starting", arguments.behaviour, flush=True)
    if arguments.behaviour == "dies":
        print("cannot open the frobnicator", file=sys.stderr, flush=True)
        return 3
    if arguments.behaviour == "batons-own":
        asyncio.run(serve(arguments.ready_file))
        return 0
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if arguments.behaviour == "ignores-term" else stopping.set())
    watch = ParentWatch(arguments.parent_pid, arguments.drain_timeout_s)
    if arguments.behaviour == "has-child":
        child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
        print("child", child.pid, flush=True)
    server, servicer = grpc.server(ThreadPoolExecutor(2)), health.HealthServicer()
    serving = health_pb2.HealthCheckResponse.ServingStatus
    servicer.set("", serving.NOT_SERVING if arguments.behaviour == "not-serving" else serving.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    if arguments.behaviour != "never-ready":
        say_ready(arguments.ready_file, f"127.0.0.1:{port}")
    while not stopping.wait(0.05):
        pass
    print("stopping", flush=True)
    server.stop(None).wait()
    watch.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
