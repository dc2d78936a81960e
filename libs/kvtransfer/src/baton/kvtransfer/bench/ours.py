"""This library, between two processes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import numpy as np

from baton.kvtransfer import AgentConfig, Doorbell, WriteHandle, open_agent
from baton.kvtransfer.bench.cases import SIZES, WARM_PUTS, Case


def _receive(pipe: Connection, transport: str, num_bytes: int) -> None:
    with open_agent(AgentConfig(instance_id="bench-receiver", transport=transport, probe_bytes=0)) as agent:
        region = agent.allocate(num_bytes)
        inbox = agent.open_inbox("bench-sender", region, 4)
        pipe.send(inbox.invitation)
        slot: int | None = None
        while (room := pipe.recv()) is not None:
            if slot is not None:
                inbox.disarm(slot)
            slot = inbox.arm(room, 1)
            pipe.send(slot)


def _send(pipe: Connection, transport: str, case: Case) -> None:
    with Ours(transport) as ours:
        pipe.send(ours.gigabytes_per_s(case))


def in_new_processes(transport: str, case: Case) -> float:
    """GB/s of `case` between two processes that nothing was done in before. Raises RuntimeError when they end without an answer."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, transport, case))
    process.start()
    theirs.close()
    try:
        return float(pipe.recv())
    except EOFError as error:
        raise RuntimeError(f"the sender of the benchmark ended with status {process.exitcode} and no figure") from error
    finally:
        process.join()


class Ours:
    """A sender in this process, a receiver in another one. Every room ends with its doorbell: what is timed is what a caller waits for."""

    def __init__(self, transport: str, num_bytes: int = max(SIZES)) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, transport, num_bytes), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the receiver is seen here
        self._agent = open_agent(AgentConfig(instance_id="bench-sender", transport=transport, probe_bytes=0))
        self._source = self._agent.allocate(num_bytes)
        np.frombuffer(self._source.buffer, dtype=np.uint8)[:] = 1
        self._peer = self._agent.connect(self._pipe.recv(), self._source)
        self._ended = threading.Event()
        self._agent.on_write(self._on_write)
        self._room = 0

    @property
    def description(self) -> str:
        return f"{self._agent.description}; writes go over {self._peer.transport}"

    def _on_write(self, _: WriteHandle) -> None:
        self._ended.set()

    def arm(self) -> int:
        """The receiver arms a doorbell for the next room. -> its slot."""
        self._room += 1
        self._pipe.send(self._room)
        return int(self._pipe.recv())

    def write(self, rows: np.ndarray, slot: int) -> tuple[WriteHandle, float, float]:
        """One room of `rows`. -> its handle, seconds that `post` took, time.monotonic() before it."""
        handle = self._peer.begin(self._room)
        self._ended.clear()
        start = time.monotonic()
        handle.post(rows)
        posted = time.monotonic() - start
        handle.finish(slot, Doorbell(self._room, 1))
        self._ended.wait()
        if handle.error:
            raise handle.error
        return handle, posted, start

    def gigabytes_per_s(self, case: Case) -> float:
        for count in (WARM_PUTS, case.count):
            rows = np.zeros((count, 3), dtype=np.int64)
            rows[:, 2] = case.num_bytes
            handle, _, start = self.write(rows, self.arm())
        assert handle.done_time is not None  # it is final
        return case.num_bytes * case.count / (handle.done_time - start) / 1e9

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._agent.close()
        self._pipe.send(None)
        self._process.join(10)
