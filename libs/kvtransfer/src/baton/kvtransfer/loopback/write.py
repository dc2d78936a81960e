"""One request's writes, in this process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from baton.kvtransfer import doorbell as records
from baton.kvtransfer.base import MAX_PARTS, WriteHandle, WriteState
from baton.kvtransfer.doorbell import Doorbell
from baton.kvtransfer.errors import Closed, InvalidArgument, PeerLost, TransferError
from baton.kvtransfer.loopback.inbox import LoopbackInbox
from baton.kvtransfer.loopback.region import LoopbackRegion
from baton.kvtransfer.spans import SpanArray, check, merge


class LoopbackWriteHandle(WriteHandle):
    def __init__(self, room: int, source: LoopbackRegion, inbox: LoopbackInbox, submit: Callable[[LoopbackWriteHandle], None]) -> None:
        self._room = room
        self._source = source
        self._inbox = inbox
        self._submit = submit
        self._lock = threading.Lock()
        self._batches: deque[SpanArray] = deque()
        self._ending: tuple[int, Doorbell] | None = None
        self._is_cancelled = False
        self._state = WriteState.OPEN
        self._error: TransferError | None = None
        self._num_bytes = 0
        self._num_puts = 0
        self._first_post_time: float | None = None
        self._busy_s = 0.0
        self._parts: list[list[int]] = []
        self._is_begun = False
        self._done_time: float | None = None

    @property
    def room(self) -> int:
        return self._room

    def post(self, spans: SpanArray, ready: int | None = None) -> None:
        if ready is not None:
            raise InvalidArgument(f"ready={ready:#x}: the loopback backend knows no CUDA events")
        rows = check(np.asarray(spans), self._source.num_bytes, self._inbox.region.num_bytes)
        with self._lock:
            if self._state is WriteState.FAILED:
                return
            if self._ending or self._is_cancelled or self._state is not WriteState.OPEN:
                raise Closed(f"room {self._room}: post after finish, cancel or the end ({self._state.value})")
            self._batches.append(merge(rows).copy())
        self._submit(self)

    def finish(self, slot: int, doorbell: Doorbell) -> None:
        if not 0 <= slot < self._inbox.num_doorbells:
            raise InvalidArgument(f"slot={slot} is outside [0, {self._inbox.num_doorbells}), the inbox's doorbells")
        with self._lock:
            ended = self._is_cancelled or self._state not in (WriteState.OPEN, WriteState.FAILED)
            if self._ending or ended:
                raise Closed(f"room {self._room}: finish after finish, cancel or the end ({self._state.value})")
            self._ending = (slot, doorbell)
        self._submit(self)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._submit(self)

    def step(self) -> bool:
        """The queue's thread: copies one span, or ends. True when there is more to do; the state is final when `state` says so."""
        with self._lock:
            if self._state is not WriteState.OPEN:
                return False
            if self._is_cancelled:
                self._batches.clear()
                self._become(WriteState.QUIESCED)
                return False
            if self._batches:
                self._copy_one()
                return True
            if self._ending is None:
                return False
            slot, doorbell = self._ending
            self._become(WriteState.DONE)
        self._inbox.ring(slot, records.encode(doorbell, self._inbox.nonce))
        return False

    def fail(self, text: str) -> bool:
        """True when that ended it."""
        with self._lock:
            if self._state is not WriteState.OPEN:
                return False
            self._batches.clear()
            self._error = PeerLost(text)
            self._become(WriteState.FAILED)
            return True

    def _copy_one(self) -> None:
        batch = self._batches[0]
        if len(batch) == 0:
            self._batches.popleft()
            self._is_begun = False
            return
        source, destination, length = (int(number) for number in batch[0])
        start = time.monotonic()
        if self._first_post_time is None:
            self._first_post_time = start
        self._inbox.region.buffer[destination : destination + length] = self._source.buffer[source : source + length]
        self._num_bytes += length
        self._num_puts += 1
        self._batches[0] = batch[1:]
        self._busy_s += time.monotonic() - start
        self._note_part(round(start * 1e9), length)

    def _note_part(self, begin_ns: int, num_bytes: int) -> None:
        if not self._is_begun and len(self._parts) < MAX_PARTS:
            self._parts.append([begin_ns, 0, 0])
        self._is_begun = True
        self._parts[-1][1] = time.monotonic_ns()
        self._parts[-1][2] += num_bytes

    def _become(self, state: WriteState) -> None:
        self._done_time = time.monotonic()
        self._state = state

    @property
    def state(self) -> WriteState:
        return self._state

    @property
    def error(self) -> TransferError | None:
        return self._error

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_puts(self) -> int:
        return self._num_puts

    @property
    def first_post_time(self) -> float | None:
        return self._first_post_time

    @property
    def busy_s(self) -> float:
        return self._busy_s

    @property
    def done_time(self) -> float | None:
        return self._done_time

    def parts(self) -> npt.NDArray[np.int64]:
        with self._lock:
            rows = self._parts if self._state is WriteState.DONE else []
            return np.array(rows, dtype=np.int64).reshape(-1, 3)
