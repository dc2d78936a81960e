"""An agent whose peers are other loopback agents of the same process."""

from __future__ import annotations

import ctypes
import logging
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable

from baton.kvtransfer.base import Agent, Inbox, Peer, Region, WriteHandle, WriteState
from baton.kvtransfer.checks import whole
from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.errors import Closed, IncompatiblePeer, InvalidArgument, PeerUnreachable, UnexpectedTransport
from baton.kvtransfer.identity import Identity
from baton.kvtransfer.invitation import Invitation, Window, require_same
from baton.kvtransfer.loopback.inbox import LoopbackInbox
from baton.kvtransfer.loopback.peer import LoopbackPeer
from baton.kvtransfer.loopback.region import LoopbackRegion
from baton.kvtransfer.loopback.write import LoopbackWriteHandle

log = logging.getLogger("baton.kvtransfer")

#: The "network": open inboxes of this process by the nonce in their invitations.
_inboxes: weakref.WeakValueDictionary[int, LoopbackInbox] = weakref.WeakValueDictionary()
_NO_WINDOW = Window(0, 0, b"")


class LoopbackAgent(Agent):
    """One thread copies and calls back. `paused` holds it before the next span: a sender that is suspended, for tests."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._here = Identity.of_this_process(config.instance_id)
        self._condition = threading.Condition()
        self._work: deque[LoopbackWriteHandle] = deque()
        self._notices: deque[Callable[[], None]] = deque()
        self._paused = False
        self._is_closed = False
        self._own: list[LoopbackInbox] = []
        self._regions: weakref.WeakSet[LoopbackRegion] = weakref.WeakSet()
        self._peers: list[LoopbackPeer] = []
        self._on_doorbell: list[Callable[[Inbox], None]] = []
        self._on_write: list[Callable[[WriteHandle], None]] = []
        self._on_peer_lost: list[Callable[[Peer], None]] = []
        self._queue = threading.Thread(target=self._copy, name="baton-kv-queue", daemon=True)
        self._notifier = threading.Thread(target=self._notify, name="baton-kv-notifier", daemon=True)
        self._queue.start()
        self._notifier.start()

    @property
    def identity(self) -> bytes:
        return self._here.encode()

    @property
    def description(self) -> str:
        return "loopback (the fake: one process, no UCX)"

    @property
    def paused(self) -> bool:
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        with self._condition:
            self._paused = value
            self._condition.notify_all()

    def allocate(self, num_bytes: int) -> LoopbackRegion:
        self._require_open()
        return self._keep(LoopbackRegion(bytearray(whole("num_bytes", num_bytes, 1, 1 << 63))))

    def register(self, address: int, num_bytes: int) -> LoopbackRegion:
        self._require_open()
        if num_bytes < 1 or address < 1:
            raise InvalidArgument(f"address={address:#x}, num_bytes={num_bytes}: both must be at least 1")
        return self._keep(LoopbackRegion((ctypes.c_char * num_bytes).from_address(address)))

    def open_inbox(self, sender_id: str, region: Region, num_doorbells: int = 1024) -> LoopbackInbox:
        self._require_open()
        region = self._of_this_agent("region", region)
        num_doorbells = whole("num_doorbells", num_doorbells, 1, 1 << 20)
        nonce = secrets.randbits(63) | 1
        inbox = LoopbackInbox(sender_id, region, nonce, num_doorbells, self._ring, lambda: _inboxes.pop(nonce, None))
        inbox.encoded = Invitation(
            backend="loopback",
            transport="loopback",
            sender_id=sender_id,
            identity=self._here,
            nonce=nonce,
            num_doorbells=num_doorbells,
            worker=b"",
            pool=Window(region.address, region.num_bytes, b""),
            table=_NO_WINDOW,
            bell=_NO_WINDOW,
            scratch=_NO_WINDOW,
            fingerprint=self._config.fingerprint,
        ).encode()
        _inboxes[nonce] = inbox
        self._own.append(inbox)
        return inbox

    def connect(self, invitation: bytes, source: Region) -> LoopbackPeer:
        self._require_open()
        invited = Invitation.decode(invitation)
        name = invited.identity.instance_id
        source = self._of_this_agent("source", source)
        if invited.backend != "loopback":
            raise IncompatiblePeer(f"{name}: backend {invited.backend!r} there, 'loopback' here")
        require_same(self._config.fingerprint, invited.fingerprint)
        if self._config.expected_transport not in ("", "loopback"):
            raise UnexpectedTransport(f"{name}: transport 'loopback', expected_transport={self._config.expected_transport!r}")
        inbox = _inboxes.get(invited.nonce)
        if inbox is None or not inbox.admit_writer():
            raise PeerUnreachable(f"{name}: no such inbox in this process, or it is fenced")
        peer = LoopbackPeer(name, inbox, source, self._submit, self._ended)
        self._peers.append(peer)
        return peer

    def on_doorbell(self, callback: Callable[[Inbox], None]) -> None:
        self._on_doorbell.append(callback)

    def on_write(self, callback: Callable[[WriteHandle], None]) -> None:
        self._on_write.append(callback)

    def on_peer_lost(self, callback: Callable[[Peer], None]) -> None:
        self._on_peer_lost.append(callback)

    def lose(self, peer: LoopbackPeer, missing: str = "") -> None:
        """For tests: the way to `peer` breaks. missing: what of this host is gone, as `Peer.missing` says it."""
        peer.break_off(missing or "the path broke", missing)
        self._tell(lambda: [callback(peer) for callback in self._on_peer_lost])

    def close(self) -> None:
        if self._is_closed:
            return
        for peer in list(self._peers):
            peer.close()
        for inbox in self._own:
            inbox.close()
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        for thread in (self._queue, self._notifier):
            if thread is not threading.current_thread():
                thread.join()

    def _keep(self, region: LoopbackRegion) -> LoopbackRegion:
        self._regions.add(region)
        return region

    def _of_this_agent(self, name: str, region: Region) -> LoopbackRegion:
        if not isinstance(region, LoopbackRegion):
            raise InvalidArgument(f"{name} is a {type(region).__name__}, must come from this agent")
        if region not in self._regions:
            raise InvalidArgument(f"{name} is a region of another agent, must come from {self._config.instance_id}")
        return region

    def _require_open(self) -> None:
        if self._is_closed:
            raise Closed("the agent is closed")

    def _submit(self, handle: LoopbackWriteHandle) -> None:
        with self._condition:
            self._work.append(handle)
            self._condition.notify_all()

    def _ended(self, handle: LoopbackWriteHandle) -> None:
        self._tell(lambda: [callback(handle) for callback in self._on_write])

    def _ring(self, inbox: LoopbackInbox) -> None:
        self._tell(lambda: [callback(inbox) for callback in self._on_doorbell])

    def _tell(self, notice: Callable[[], object]) -> None:
        with self._condition:
            self._notices.append(lambda: (notice(), None)[1])
            self._condition.notify_all()

    def _copy(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closed or (self._work and not self._paused))
                if self._is_closed:
                    return
                handle = self._work.popleft()
            was_open = handle.state is WriteState.OPEN
            if handle.step():
                self._submit(handle)
            elif was_open and handle.state is not WriteState.OPEN:
                self._ended(handle)

    def _notify(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closed or self._notices)
                if not self._notices:
                    return
                notice = self._notices.popleft()
            try:
                notice()
            except Exception:
                log.exception("a callback of kvtransfer raised")
