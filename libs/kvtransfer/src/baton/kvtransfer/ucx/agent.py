"""The process's side of the library, over UCX: contexts, queues, inboxes, and the one thread that calls back."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.kvtransfer import _native
from baton.kvtransfer.base import Agent, Inbox, Peer, Region, WriteHandle
from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.errors import Closed, IncompatiblePeer, InvalidArgument, PeerUnreachable, UCXError, UnexpectedTransport
from baton.kvtransfer.identity import Identity, is_gone
from baton.kvtransfer.invitation import Invitation, Window, require_same
from baton.kvtransfer.ucx import library, options
from baton.kvtransfer.ucx.inbox import UcxInbox
from baton.kvtransfer.ucx.peer import UcxPeer
from baton.kvtransfer.ucx.region import UcxRegion
from baton.kvtransfer.ucx.sending import SendingSide
from baton.kvtransfer.ucx.write import UcxWriteHandle

log = logging.getLogger("baton.kvtransfer")
T = TypeVar("T")

#: Native threads must be gone before UCX's own exit handlers run.
_open_agents: weakref.WeakSet[UcxAgent] = weakref.WeakSet()


@atexit.register
def _close_leaked() -> None:
    for agent in list(_open_agents):
        log.warning("kvtransfer agent %s was never closed", agent.instance_id)
        agent.close()


_WRITE_FINAL, _DOORBELL, _LINK_LOST = 0, 1, 2
_MAX_DOORBELLS = 1 << 20


class UcxAgent(Agent):
    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._library = library.load(config.ucx_library)
        self._here = Identity.of_this_process(config.instance_id)
        self._device = int(config.device) if config.device else -1
        self._is_shared = config.transport != "tcp"
        self._context = _native.Context(options.receiving(config), self._device)
        self._notices = _native.Notices()
        self._ids = itertools.count(1)
        self._lock = threading.RLock()
        self._sides: dict[str, SendingSide] = {}
        self._receiver: _native.Receiver | None = None
        self._scratch: _native.Memory | None = None
        self._regions: weakref.WeakSet[UcxRegion] = weakref.WeakSet()
        self._inboxes: dict[int, UcxInbox] = {}
        self._peers: dict[int, UcxPeer] = {}
        self._writes: dict[int, UcxWriteHandle] = {}
        self._on_doorbell: list[Callable[[Inbox], None]] = []
        self._on_write: list[Callable[[WriteHandle], None]] = []
        self._on_peer_lost: list[Callable[[Peer], None]] = []
        self._is_closed = False
        self._notifier = threading.Thread(target=self._notify, name="baton-kv-notifier", daemon=True)
        self._notifier.start()
        _open_agents.add(self)
        log.info("kvtransfer agent %s: %s", config.instance_id, self.description)

    @property
    def instance_id(self) -> str:
        return self._config.instance_id

    @property
    def identity(self) -> bytes:
        return self._here.encode()

    @property
    def description(self) -> str:
        memory = f"CUDA device {self._device}" if self._device >= 0 else "host memory"
        return f"UCX {self._library.version} from {self._library.path}, transport {self._config.transport}, {memory}"

    def allocate(self, num_bytes: int) -> UcxRegion:
        if num_bytes < 1:
            raise InvalidArgument(f"num_bytes={num_bytes} must be at least 1")
        return self._keep(_native.Memory.allocate(self._open_context(), num_bytes, self._is_shared))

    def register(self, address: int, num_bytes: int) -> UcxRegion:
        if num_bytes < 1 or address < 1:
            raise InvalidArgument(f"address={address:#x}, num_bytes={num_bytes}: both must be at least 1")
        return self._keep(_native.Memory.adopt(self._open_context(), address, num_bytes))

    def open_inbox(self, sender_id: str, region: Region, num_doorbells: int = 1024) -> UcxInbox:
        if not isinstance(region, UcxRegion):
            raise InvalidArgument(f"region is a {type(region).__name__}, must come from this agent")
        if not 1 <= num_doorbells <= _MAX_DOORBELLS:
            raise InvalidArgument(f"num_doorbells={num_doorbells} is outside [1, {_MAX_DOORBELLS}]")
        with self._lock:
            receiver = self._receiving_side()
            inbox_id, nonce = next(self._ids), secrets.randbits(63) | 1
            native = receiver.open_inbox(inbox_id, nonce, num_doorbells, region.primary, self._scratch_memory())
            inbox = UcxInbox(
                sender_id,
                native,
                receiver,
                self._invite(sender_id, region, receiver, native, nonce, num_doorbells),
                num_doorbells,
                self._is_shared,
                self._here,
                forget=lambda: self._take(self._inboxes, inbox_id),
            )
            self._inboxes[inbox_id] = inbox
            return inbox

    def connect(self, invitation: bytes, source: Region) -> UcxPeer:
        invited = Invitation.decode(invitation)
        if not isinstance(source, UcxRegion):
            raise InvalidArgument(f"source is a {type(source).__name__}, must come from this agent")
        if invited.backend != "ucx":
            raise IncompatiblePeer(f"{invited.identity.instance_id}: backend {invited.backend!r} there, 'ucx' here")
        require_same(self._config.fingerprint, invited.fingerprint)
        path = self._path_to(invited)
        with self._lock:
            side = self._sending_side(path)
            link_id = secrets.randbits(63) | 1  # receivers tell the links of all senders apart by it
        pidfd = self._watch(invited) if path == options.SHM else -1
        link = _native.Link(
            side.pick_queue(),
            invited,
            source.memory_in(side.context),
            link_id,
            path == options.SHM,
            pidfd,
            self._config.max_in_flight,
            self._config.max_put_bytes,
            invited.device if self._device >= 0 else b"",
            invited.device_scratch if self._device >= 0 else b"",
        )
        peer = UcxPeer(link, invited, source.num_bytes, self._config.probe_timeout_s, side, self._begin, lambda: self._take(self._peers, link_id))
        with self._lock:
            self._peers[link_id] = peer
        try:
            link.connect(int(self._config.connect_timeout_s * 1e9))
            self._require_expected(link, invited)
        except UCXError as error:
            peer.close()
            raise PeerUnreachable(
                f"{invited.identity.instance_id} over {path}, within {self._config.connect_timeout_s} s (connect_timeout_s): {error.reason}"
            ) from error
        except UnexpectedTransport:
            peer.close()
            raise
        log.info("connected to %s over %s", peer.instance_id, peer.transport)
        return peer

    def on_doorbell(self, callback: Callable[[Inbox], None]) -> None:
        self._on_doorbell.append(callback)

    def on_write(self, callback: Callable[[WriteHandle], None]) -> None:
        self._on_write.append(callback)

    def on_peer_lost(self, callback: Callable[[Peer], None]) -> None:
        self._on_peer_lost.append(callback)

    def close(self) -> None:
        with self._lock:
            if self._is_closed or os.getpid() != self._here.pid:  # a fork has no threads to join, and the memory is not its own
                return
            self._is_closed = True
        _open_agents.discard(self)
        for peer in list(self._peers.values()):
            peer.close()
        for side in self._sides.values():
            side.stop()
        for inbox in list(self._inboxes.values()):
            inbox.close()
        if self._receiver is not None:
            self._receiver.stop()
        self._notices.close()
        if threading.current_thread() is not self._notifier:
            self._notifier.join()
        for region in list(self._regions):
            region.close()
        self._sides.clear()
        self._receiver = self._scratch = None

    def _open_context(self) -> _native.Context:
        if self._is_closed:
            raise Closed("the agent is closed")
        if os.getpid() != self._here.pid:
            raise Closed("this agent was opened in another process: its threads do not live on after a fork; open one here")
        return self._context

    def _keep(self, memory: _native.Memory) -> UcxRegion:
        region = UcxRegion(memory, self._context)
        self._regions.add(region)
        return region

    def _begin(self, link: _native.Link, peer: UcxPeer, room: int) -> UcxWriteHandle | None:
        with self._lock:  # the notifier must not see the end of a write before the write
            write_id = next(self._ids)
            write = link.begin(write_id, room)
            if write is None:
                return None
            handle = self._writes[write_id] = peer.wrap(write)
            return handle

    def _take(self, table: dict[int, T], key: int) -> T | None:
        with self._lock:
            return table.pop(key, None)

    def _receiving_side(self) -> _native.Receiver:
        context = self._open_context()
        if self._receiver is None:
            self._receiver = _native.Receiver(context, self._notices, self._config.transport != "shm", self._is_shared)
        return self._receiver

    def _scratch_memory(self) -> _native.Memory:
        if self._scratch is None:
            num_bytes = max(self._config.probe_bytes, 1)
            if self._device >= 0:
                self._scratch = _native.Memory.allocate_device(self._context, num_bytes)
            else:
                self._scratch = _native.Memory.allocate(self._context, num_bytes, self._is_shared)
        return self._scratch

    def _sending_side(self, path: str) -> SendingSide:
        context = self._open_context()
        if path not in self._sides:
            own = context if self._config.transport != "auto" else _native.Context(options.sending(self._config, path), self._device)
            self._sides[path] = SendingSide(own, self._notices, self._config)
        return self._sides[path]

    def _invite(self, sender_id: str, region: UcxRegion, receiver: _native.Receiver, native: _native.Inbox, nonce: int, num_doorbells: int) -> bytes:
        pool, scratch = region.primary, self._scratch_memory()
        return Invitation(
            backend="ucx",
            transport=self._config.transport,
            sender_id=sender_id,
            identity=self._here,
            nonce=nonce,
            num_doorbells=num_doorbells,
            worker=native.worker_address,
            pool=Window(pool.address, pool.num_bytes, pool.pack_key()),
            table=Window(native.table_address, native.table_bytes, native.table_key()),
            bell=Window(receiver.bell_address, receiver.bell_bytes, receiver.bell_key()),
            scratch=Window(scratch.address, self._config.probe_bytes, scratch.pack_key()),
            device=self._export(pool),
            device_scratch=self._export(scratch),
            fingerprint=self._config.fingerprint,
        ).encode()

    def _export(self, memory: _native.Memory) -> bytes:
        if self._device < 0 or not self._is_shared:
            return b""
        try:
            return memory.export_device()
        except UCXError as error:
            log.warning("the CUDA memory at %#x cannot be mapped by other processes (%s): writes go by UCX's puts", memory.address, error)
            return b""

    def _path_to(self, invited: Invitation) -> str:
        ours, theirs = self._config.transport, invited.transport
        if {ours, theirs} == {"shm", "tcp"}:
            raise IncompatiblePeer(f"{invited.identity.instance_id}: transport {theirs!r} there, {ours!r} here")
        near = self._here.shares_memory_with(invited.identity)
        if "tcp" in (ours, theirs):
            return options.NETWORK
        if near:
            return options.SHM
        if "shm" in (ours, theirs):
            raise IncompatiblePeer(
                f"{invited.identity.instance_id}: transport 'shm' is demanded ({ours!r} here, {theirs!r} there), but the two processes do not "
                "share host, pid namespace and ipc namespace; use 'auto' or 'tcp'"
            )
        return options.NETWORK

    def _watch(self, invited: Invitation) -> int:
        """A pidfd of the receiver: shared memory never tells that the other side is gone."""
        try:
            pidfd = os.pidfd_open(invited.identity.pid)
        except ProcessLookupError as error:
            raise PeerUnreachable(f"{invited.identity.instance_id}: its process {invited.identity.pid} has ended") from error
        if is_gone(invited.identity, self._here):
            os.close(pidfd)
            raise PeerUnreachable(f"{invited.identity.instance_id}: its process {invited.identity.pid} has ended")
        return pidfd

    def _require_expected(self, link: _native.Link, invited: Invitation) -> None:
        expected = self._config.expected_transport
        if expected and expected not in link.transports:
            raise UnexpectedTransport(
                f"{invited.identity.instance_id}: UCX chose {link.transports!r}, expected_transport={expected!r}; allow that path, or find out "
                "why the other one is not there"
            )

    def _notify(self) -> None:
        while notices := self._notices.wait():
            for kind, number in notices:
                if kind == _WRITE_FINAL and (handle := self._take(self._writes, number)) is not None:
                    _call(self._on_write, handle)
                elif kind == _DOORBELL and (inbox := self._inboxes.get(number)) is not None:
                    _call(self._on_doorbell, inbox)
                elif kind == _LINK_LOST and (peer := self._peers.get(number)) is not None:
                    _call(self._on_peer_lost, peer)


def _call(callbacks: Sequence[Callable[[T], None]], argument: T) -> None:
    for callback in callbacks:
        try:
            callback(argument)
        except Exception:
            log.exception("a callback of kvtransfer raised")
