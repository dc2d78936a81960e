"""The threads of a tensor-parallel engine: one for each rank, all at the same work, led by the engine's own thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from baton.engine.errors import RankFailedError

T = TypeVar("T")

#: How long the other ranks may take to come back once the group was aborted.
ABORT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Result:
    rank: int
    value: Any


@dataclass(frozen=True, slots=True)
class _Fault:
    rank: int
    error: BaseException


class Ranks:
    """`run` is called from one thread at a time and returns when every rank has.

    A process, not a rank, is what dies and what peers fence: a rank that fails ends all others. on_fault: ends what they may wait in.
    Close it; the threads are daemons only so that a process which is lost anyway can end.
    """

    def __init__(self, devices: Sequence[torch.device], on_fault: Callable[[], None]) -> None:
        self.size = len(devices)
        self._on_fault = on_fault
        self._work: list[queue.SimpleQueue[Callable[[int], Any] | None]] = [queue.SimpleQueue() for _ in devices]
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.fault: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, device), name=f"rank {rank} on {device}", daemon=True)
            for rank, device in enumerate(devices)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[int], T], hear: Callable[[Any], None] | None = None) -> list[T]:
        """`work(rank)` on every rank's thread at once; their results in order. hear: gets, on this thread, what a rank says with `say` meanwhile.

        Raises RankFailedError, with the first rank's error as its cause, after all others have come back or ABORT_S have passed; from then on,
        always. What the caller's `hear` raises counts as a fault too.
        """
        if self.fault is not None:
            raise self.fault
        for each in self._work:
            each.put(work)
        results: list[Any] = [None] * self.size
        left = self.size
        while left:
            match self._said.get():
                case _Result(rank, value):
                    results[rank] = value
                    left -= 1
                case _Fault(rank, error):
                    self.fail(rank, error)
                    self._give_up(left - 1)
                case message:
                    assert hear is not None, f"a rank said {message!r} to nobody"
                    try:
                        hear(message)
                    except BaseException as error:
                        self._lose(error)
                        self._give_up(left)
        return results

    def say(self, message: object) -> None:
        """From a rank's thread, to who waits in `run`."""
        self._said.put(message)

    def fail(self, rank: int, error: BaseException) -> BaseException:
        """Ends the group because of what was seen of one rank, on the thread that leads. The error to raise: the first one counts."""
        fault = RankFailedError(rank, self.size, error)
        fault.__cause__ = error
        return self._lose(fault)

    def close(self) -> None:
        """Idempotent. Waits for the threads, unless the group is lost: then one of them may hang in a device for good."""
        for each in self._work:
            each.put(None)
        for thread in self._threads:
            thread.join(None if self.fault is None else ABORT_S)

    def _lose(self, fault: BaseException) -> BaseException:
        if self.fault is None:
            self.fault = fault
            self._on_fault()
        return self.fault

    def _give_up(self, left: int) -> NoReturn:
        """Waits for the ranks that are still at work, but not for ever."""
        assert self.fault is not None
        deadline = time.monotonic() + ABORT_S
        while left:
            try:
                said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            left -= isinstance(said, (_Result, _Fault))
        raise self.fault

    def _serve(self, rank: int, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while (work := self._work[rank].get()) is not None:
            try:
                self._said.put(_Result(rank, work(rank)))
            except BaseException as error:
                self._said.put(_Fault(rank, error))
            del work  # not kept alive until the next
