"""The face of the library: what every backend does. Thread safe unless said otherwise; nothing here waits for a peer unless it says so."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from baton.kvtransfer.doorbell import Doorbell
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.spans import SpanArray


class WriteState(enum.Enum):
    """OPEN: more may be posted, or is on its way. The other three are final.

    DONE: everything was flushed and the doorbell rung. QUIESCED: cancelled; nothing of it is on its way. FAILED: the peer or the path broke;
    what was posted may still land where no error stops it: the receiver needs a fence.
    """

    OPEN = "open"
    DONE = "done"
    QUIESCED = "quiesced"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProbePoint:
    """direction: "write" (here to there) or "read". gigabytes_per_s: 1e9 bytes a second."""

    direction: str
    num_bytes: int
    gigabytes_per_s: float


@dataclass(frozen=True, slots=True)
class InboxStats:
    """Counters since the inbox was opened. stale: whole records of another room or generation. invalid: records that do not check."""

    num_rung: int = 0
    num_stale: int = 0
    num_invalid: int = 0
    num_found_by_backstop: int = 0


class Region(ABC):
    """Registered memory. Views of `buffer` keep it mapped: after `close`, it goes when the last view does."""

    @property
    @abstractmethod
    def address(self) -> int: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """Writable bytes, shape [num_bytes]. Raises InvalidArgument for device memory."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Close the inboxes and peers that use it first."""


#: Rows of WriteHandle.parts.
MAX_PARTS = 1024


class WriteHandle(ABC):
    """One request's writes to one peer. Its source bytes must stay as they are until the state is final."""

    @property
    @abstractmethod
    def room(self) -> int: ...

    @abstractmethod
    def post(self, spans: SpanArray, ready: int | None = None) -> None:
        """Queues one-sided writes and returns. spans: int64 [n, 3] rows of source offset, destination offset, bytes; they are copied, and
        adjacent ones merged.

        ready: a CUDA event (its handle as an integer): nothing of this call is read from the source before it has fired. The caller keeps the event
        alive until the handle is final. Raises InvalidArgument (nothing is queued) for a row outside either region; Closed after finish, cancel or
        an end. A peer that broke is no error here: it is told through the state.
        """

    @abstractmethod
    def finish(self, slot: int, doorbell: Doorbell) -> None:
        """After all that was posted: flush, write the doorbell into `slot` of the inbox, flush, DONE. Returns at once.

        Raises Closed when called twice, InvalidArgument for a slot that the inbox does not have.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Stop posting, flush, QUIESCED. Returns at once. Idempotent; no effect once final.

        A doorbell that was already written is not unwritten: then the state becomes DONE.
        """

    @property
    @abstractmethod
    def state(self) -> WriteState: ...

    @property
    @abstractmethod
    def error(self) -> TransferError | None:
        """Why it FAILED."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes handed to the transport so far."""

    @property
    @abstractmethod
    def num_puts(self) -> int: ...

    @property
    @abstractmethod
    def first_post_time(self) -> float | None:
        """time.monotonic() when the first put was handed to the transport."""

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds in which something of this write was under way: num_bytes over it is the speed of the path, however slowly spans were posted."""

    @property
    @abstractmethod
    def done_time(self) -> float | None:
        """time.monotonic() when the state became final."""

    @abstractmethod
    def parts(self) -> npt.NDArray[np.int64]:
        """When each `post` was written, in order: int64 [n, 3], rows of begin and end (time.monotonic_ns()) and bytes. Empty before DONE.

        The end is when the transport needed the source no more, which over a network may be before the bytes have landed; with thousands of puts
        under way at once, ends are those of about the right put. At most MAX_PARTS rows, the last of which stands for all posts that follow.
        """


class Peer(ABC):
    """The way into one inbox of one receiver. When it is lost, connect again: a new Peer over the same invitation, or over the restarted one's."""

    @property
    @abstractmethod
    def instance_id(self) -> str:
        """The receiver's."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """What the writes really go over, e.g. "sysv", "posix", "cma", "tcp", "rc_mlx5", "cuda_ipc"; several are joined with "+"."""

    @property
    @abstractmethod
    def is_lost(self) -> bool: ...

    @property
    @abstractmethod
    def missing(self) -> str:
        """What of this host it went through that is gone, in words, as far as `check` has found; "": nothing. The receiver may be well: connect
        again, with the same invitation, and it goes another way."""

    @abstractmethod
    def check(self) -> bool:
        """Whether it is not lost. Looks, in microseconds, whether the network addresses and ports of this host that it goes through are still there:
        without one it is lost, its open handles become FAILED and `on_peer_lost` is called. `begin` does that too."""

    @abstractmethod
    def begin(self, room: int) -> WriteHandle:
        """Raises Closed, or PeerLost when the peer is known to be gone."""

    @abstractmethod
    def probe(self) -> list[ProbePoint]:
        """Measures 64 KiB, 1 MiB and 64 MiB each way, as far as the receiver's scratch memory reaches and a slow wire lets them be over in
        time. Blocks up to probe_timeout_s for each; raises PeerUnreachable after that."""

    @abstractmethod
    def close(self) -> None:
        """Stops posting; what is open becomes QUIESCED where that is proven, else FAILED (Closed). Blocks until nothing of this peer is on its way
        from here. Idempotent."""


class Inbox(ABC):
    """Where one sender may write: the pages of one region and a table of doorbells."""

    @property
    @abstractmethod
    def sender_id(self) -> str: ...

    @property
    @abstractmethod
    def invitation(self) -> bytes: ...

    @abstractmethod
    def arm(self, room: int, generation: int) -> int:
        """Takes a doorbell slot. Raises DoorbellsExhausted, Closed (also after a fence), InvalidArgument."""

    @abstractmethod
    def disarm(self, slot: int) -> None:
        """Gives a slot back. Only after the lease is over: a late writer would ring a stranger's bell."""

    @abstractmethod
    def poll(self) -> list[Doorbell]:
        """Doorbells that rang since the last call: checked, of the armed room and generation, each once."""

    @abstractmethod
    def fence(self, identity: bytes | None) -> bool:
        """Shuts the sender out for good. True: proof that nothing of it lands any more, now or later. False: no proof yet; ask again later.

        Where the transport enforces it (tcp, rc) its way in is destroyed. Where memory is shared, the proof is that every connection to this inbox
        was closed in order, or that the process of `identity` is gone. Idempotent.
        """

    @property
    @abstractmethod
    def missing(self) -> str:
        """What of this host every connection to this inbox goes through that is gone, in words: looks, in microseconds. "": nothing, or nobody is
        connected. Nothing of what its sender writes arrives any more: it needs another inbox. The first look remembers what there is to miss."""

    @property
    @abstractmethod
    def stats(self) -> InboxStats: ...

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Proves nothing: fence first where pages are still published."""


class Agent(ABC):
    """The process's side of the library. A context manager; open it with `open_agent`."""

    @property
    @abstractmethod
    def identity(self) -> bytes: ...

    @property
    @abstractmethod
    def description(self) -> str:
        """For the log: which library, version and path, which transports."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> Region:
        """Zeroed memory that other processes of this host can map, where the transport can do that."""

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> Region:
        """Memory that somebody else owns and keeps alive until the region is closed; device memory when the agent has a device."""

    @abstractmethod
    def open_inbox(self, sender_id: str, region: Region, num_doorbells: int = 1024) -> Inbox: ...

    @abstractmethod
    def connect(self, invitation: bytes, source: Region) -> Peer:
        """Blocks up to connect_timeout_s. Raises IncompatiblePeer, UnexpectedTransport, PeerUnreachable, InvalidArgument."""

    @abstractmethod
    def on_doorbell(self, callback: Callable[[Inbox], None]) -> None:
        """`callback(inbox)` runs on the agent's notifier thread when `inbox.poll()` has something. Cheap work only."""

    @abstractmethod
    def on_write(self, callback: Callable[[WriteHandle], None]) -> None:
        """`callback(handle)` runs on the notifier thread, once, when a handle's state became final. Cheap work only."""

    @abstractmethod
    def on_peer_lost(self, callback: Callable[[Peer], None]) -> None:
        """`callback(peer)` runs on the notifier thread, once, when a connected peer broke. Cheap work only: close and connect again elsewhere."""

    @abstractmethod
    def close(self) -> None:
        """Closes every inbox, peer and region, joins the threads. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
