"""The one thread that calls back: it waits for what the native threads have to tell, and knows whom it concerns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.kvtransfer import _native
from baton.kvtransfer.base import Inbox, Peer, WriteHandle
from baton.kvtransfer.ucx.inbox import UcxInbox
from baton.kvtransfer.ucx.peer import UcxPeer
from baton.kvtransfer.ucx.write import UcxWriteHandle

log = logging.getLogger("baton.kvtransfer")
T = TypeVar("T")

_WRITE_FINAL, _DOORBELL, _LINK_LOST, _UNANSWERED = range(4)


class Notifier:
    """Keeps the inboxes, peers and open writes of an agent, by the numbers that the native side knows them by.

    `lock` guards these tables; a caller that makes something native and enters it here holds it meanwhile, so that no notice comes too early.
    """

    def __init__(self) -> None:
        self.notices = _native.Notices()
        self.lock = threading.RLock()
        self.inboxes: dict[int, UcxInbox] = {}
        self.peers: dict[int, UcxPeer] = {}
        self.writes: dict[int, UcxWriteHandle] = {}
        self.on_doorbell: list[Callable[[Inbox], None]] = []
        self.on_write: list[Callable[[WriteHandle], None]] = []
        self.on_peer_lost: list[Callable[[Peer], None]] = []
        self._thread = threading.Thread(target=self._run, name="baton-kv-notifier", daemon=True)
        self._thread.start()

    def take(self, table: dict[int, T], number: int) -> T | None:
        with self.lock:
            return table.pop(number, None)

    def close(self) -> None:
        """After what was told so far was passed on. From a callback it returns before that."""
        self.notices.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while notices := self.notices.wait():
            for kind, number in notices:
                if kind == _WRITE_FINAL and (handle := self.take(self.writes, number)) is not None:
                    _call(self.on_write, handle)
                elif kind == _DOORBELL and (inbox := self.inboxes.get(number)) is not None:
                    _call(self.on_doorbell, inbox)
                elif kind == _LINK_LOST and (peer := self.peers.get(number)) is not None:
                    _call(self.on_peer_lost, peer)
                elif kind == _UNANSWERED and (inbox := self.inboxes.get(number)) is not None:
                    log.error("inbox of %s: a sender that no network device here leads back to has connected; it is not answered", inbox.sender_id)


def _call(callbacks: Sequence[Callable[[T], None]], argument: T) -> None:
    for callback in callbacks:
        try:
            callback(argument)
        except Exception:
            log.exception("a callback of kvtransfer raised")
