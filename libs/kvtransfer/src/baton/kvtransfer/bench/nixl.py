"""NIXL, where it is installed, between two processes of its own: it bundles another build of UCX, which must not come into ours."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np

from baton.kvtransfer.bench.cases import SIZES, WARM_PUTS, Case

_NAMES = ("nixl_cu13", "nixl_cu12", "nixl")
_IMPORT_TIMEOUT_S = 120


def module_name() -> str | None:
    return next((name for name in _NAMES if (spec := find_spec(name)) and spec.origin), None)


def why_not() -> str:
    """One line for people: why NIXL is left out. Empty: it imports (tried in a process of its own)."""
    name = module_name()
    if name is None:
        return "neither nixl-cu13 nor nixl-cu12 is installed (pip install nixl-cu13)"
    command = [sys.executable, "-c", f"import {name}._api"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    if done.returncode == 0:
        return ""
    return f"{name} does not import: {(done.stderr.strip().splitlines() or [f'exit status {done.returncode}'])[-1]}"


def description() -> str:
    name = module_name()
    return f"{name} {version(name.replace('_', '-'))}" if name else ""


def _open(name: str, transport: str, num_threads: int) -> tuple[Any, np.ndarray]:
    if transport == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    api = importlib.import_module(f"{module_name()}._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], num_threads=num_threads))
    memory = np.ones(max(SIZES), dtype=np.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def _target(pipe: Connection, transport: str, num_threads: int) -> None:
    agent, memory = _open("target", transport, num_threads)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()


def _initiator(pipe: Connection, transport: str, num_threads: int) -> None:
    agent, memory = _open("initiator", transport, num_threads)
    metadata, remote = pipe.recv()
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        num_bytes, count = task
        for puts in (WARM_PUTS, count):
            sources, targets = ([(address, num_bytes, 0)] * puts for address in (memory.ctypes.data, remote))
            descriptors = (agent.get_xfer_descs(spans, "DRAM") for spans in (sources, targets))
            handle = agent.initialize_xfer("WRITE", *descriptors, name)
            start = time.monotonic()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            elapsed = time.monotonic() - start
            if state != "DONE":
                raise RuntimeError(f"NIXL ended with {state}")
            agent.release_xfer_handle(handle)
        pipe.send(num_bytes * count / elapsed / 1e9)


class Nixl:
    """Its threads spin even when nothing is to be done, so its processes are stopped (SIGSTOP) while others are measured."""

    def __init__(self, transport: str, num_threads: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for role in (_target, _initiator):
            pipe, theirs = context.Pipe()
            process = context.Process(target=role, args=(theirs, transport, num_threads), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        target, self._initiator = self._pipes
        self._initiator.send(target.recv())
        self._initiator.recv()
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None:
                os.kill(process.pid, number)

    def gigabytes_per_s(self, case: Case) -> float:
        self._signal(signal.SIGCONT)
        self._initiator.send((case.num_bytes, case.count))
        speed = float(self._initiator.recv())
        self._signal(signal.SIGSTOP)
        return speed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._signal(signal.SIGCONT)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(10)
            process.kill()
