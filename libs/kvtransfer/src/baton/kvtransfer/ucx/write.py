"""One request's writes over UCX."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.kvtransfer import _native
from baton.kvtransfer.base import WriteHandle, WriteState
from baton.kvtransfer.doorbell import Doorbell
from baton.kvtransfer.errors import Closed, InvalidArgument, PeerLost, TransferError
from baton.kvtransfer.spans import SpanArray, as_rows
from baton.kvtransfer.ucx.birthplace import Birthplace

_STATES = (WriteState.OPEN, WriteState.DONE, WriteState.QUIESCED, WriteState.FAILED)
_ACCEPTED, _REFUSED = -1, -2


class UcxWriteHandle(WriteHandle):
    def __init__(
        self,
        write: _native.Write,
        peer_name: str,
        source_bytes: int,
        destination_bytes: int,
        num_doorbells: int,
        has_device: bool,
        birthplace: Birthplace,
    ) -> None:
        self._write = write
        self._peer_name = peer_name
        self._source_bytes = source_bytes
        self._destination_bytes = destination_bytes
        self._num_doorbells = num_doorbells
        self._has_device = has_device
        self._birthplace = birthplace

    @property
    def room(self) -> int:
        return self._write.room

    def post(self, spans: SpanArray, ready: int | None = None) -> None:
        self._birthplace.require()
        if ready:
            self._require_event(ready)
        rows = as_rows(spans)
        result = self._write.post(rows, ready or 0)
        if result == _REFUSED:
            raise Closed(f"room {self.room}: post after finish, cancel or the end ({self.state.value})")
        if result != _ACCEPTED:
            raise InvalidArgument(
                f"spans[{result}] = {rows[result].tolist()} (source offset, destination offset, bytes) is outside the source region of "
                f"{self._source_bytes} bytes or the destination region of {self._destination_bytes} bytes"
            )

    def _require_event(self, ready: int) -> None:
        if not self._has_device:
            raise InvalidArgument(f"ready={ready:#x}: this agent waits for no CUDA events, since AgentConfig.device is empty (host memory)")
        if not 0 < ready < 1 << 64:
            raise InvalidArgument(f"ready={ready:#x} is outside (0, 2**64), so it is no handle of a CUDA event")

    def finish(self, slot: int, doorbell: Doorbell) -> None:
        self._birthplace.require()
        if not 0 <= slot < self._num_doorbells:
            raise InvalidArgument(f"slot={slot} is outside [0, {self._num_doorbells}), the inbox's doorbells")
        if self._write.finish(slot, doorbell) == _REFUSED:
            raise Closed(f"room {self.room}: finish after finish, cancel or the end ({self.state.value})")

    def cancel(self) -> None:
        if not self._birthplace.is_elsewhere:
            self._write.cancel()

    @property
    def state(self) -> WriteState:
        return _STATES[self._write.state]

    @property
    def error(self) -> TransferError | None:
        if self.state is not WriteState.FAILED:
            return None
        status, text = self._write.error
        return PeerLost(f"room {self.room} to {self._peer_name}: {text} ({status})")

    @property
    def num_bytes(self) -> int:
        return self._write.num_bytes

    @property
    def num_puts(self) -> int:
        return self._write.num_puts

    @property
    def first_post_time(self) -> float | None:
        return self._write.first_post_ns / 1e9 or None

    @property
    def busy_s(self) -> float:
        return self._write.busy_ns / 1e9

    @property
    def done_time(self) -> float | None:
        return self._write.done_ns / 1e9 or None

    def parts(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._write.parts(), dtype=np.int64).reshape(-1, 3)
