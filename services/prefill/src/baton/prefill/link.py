"""One decode server as the exporter sees it: where its pages are, and how it is told something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engine.layout import KVLayout
from baton.engine.types import Failure
from baton.kvtransfer import Peer, Route
from baton.wire.v1 import bootstrap_pb2
from baton.workerkit.convert import failure_to_wire


@dataclass(frozen=True, slots=True)
class Way:
    """One of our ranks' way into the pages of one of decode's, and the KV heads that go over it."""

    route: Route
    peer: Peer


class DecodeLink:
    """`ways`: one for each route, in the order in which both sides number them. `layout`: of one rank's pool on the decode server. `page_hash`: name
    of the digest that it compares. `send` hands a message to its session from any thread; `fail` ends the session from any thread, because a way
    broke. renew: asks, from any thread, for new ways where old ones have lost what they went through on this host.

    The peers belong to whoever made the link; they are closed when they are replaced, or when the session is over.
    """

    def __init__(
        self,
        instance_id: str,
        ways: Sequence[Way],
        layout: KVLayout,
        page_hash: str,
        send: Callable[[bootstrap_pb2.FromPrefill], None],
        fail: Callable[[str], None],
        renew: Callable[[], None] | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.ways = tuple(ways)
        self.layout = layout
        self.page_hash = page_hash
        self.fail = fail
        self._send = send
        self._renew = renew

    def renew(self) -> bool:
        """Whether new ways are on their way, into the same pages: something of this host is gone that the old ones went through."""
        if self._renew is None or not any(way.peer.missing for way in self.ways):
            return False
        self._renew()
        return True

    @property
    def transport(self) -> str:
        """What the writes go over; several are joined with "+"."""
        return "+".join(dict.fromkeys(way.peer.transport for way in self.ways))

    def quiesced(self, room: int, generation: int) -> None:
        """Says that nothing of this lease will be written any more."""
        self._send(bootstrap_pb2.FromPrefill(quiesced=bootstrap_pb2.Quiesced(room=room, lease_generation=generation)))

    def declined(self, room: int, generation: int, failure: Failure) -> None:
        """The negative acknowledgement: it will not be written, and why."""
        wire = bootstrap_pb2.Declined(room=room, lease_generation=generation, failure=failure_to_wire(failure))
        self._send(bootstrap_pb2.FromPrefill(declined=wire))
