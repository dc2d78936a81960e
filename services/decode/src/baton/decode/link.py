"""One session with a prefill server, as the importer sees it: where its doorbells ring, and how it is told something."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.decode.inboxes import Inboxes
from baton.engine.types import Extent, Failure
from baton.kvtransfer import Route
from baton.wire.v1 import bootstrap_pb2, common_pb2
from baton.workerkit.convert import failure_to_wire


class PrefillLink:
    """`key` names the session and is never reused: leases hang on it, and a fence frees them.

    instance_id, identity: of the prefill server. routes: from its ranks to ours, as both sides number them. shares_clock: whether its monotonic
    clock is ours (same host). `send` works from any thread.
    """

    def __init__(
        self,
        key: str,
        address: str,
        instance_id: str,
        identity: bytes,
        inboxes: Inboxes,
        routes: Sequence[Route],
        *,
        shares_clock: bool,
        send: Callable[[bootstrap_pb2.FromDecode], None],
    ) -> None:
        self.key = key
        self.address = address
        self.instance_id = instance_id
        self.identity = identity
        self.inboxes = inboxes
        self.routes = tuple(routes)
        self.shares_clock = shares_clock
        self._send = send

    def arm(self, room: int, generation: int) -> tuple[int, ...]:
        """A doorbell for each route. Raises DoorbellsExhausted, Closed."""
        return self.inboxes.arm(self.routes, room, generation)

    def disarm(self, slots: Sequence[int]) -> None:
        self.inboxes.disarm(self.routes, slots)

    def publish(
        self,
        room: int,
        generation: int,
        pages: Sequence[Extent],
        *,
        num_tokens: int,
        resident_tokens: int,
        doorbells: Sequence[int],
        digest: bool,
        ticket: common_pb2.RoomTicket | None = None,
    ) -> None:
        """Tells prefill where to write. ticket: what the gateway gave for this room, if anything."""
        message = bootstrap_pb2.Publish(
            room=room,
            lease_generation=generation,
            pages=[common_pb2.Extent(first=extent.first, count=extent.count) for extent in pages],
            num_tokens=num_tokens,
            resident_tokens=resident_tokens,
            doorbell=doorbells[0],
            doorbells=doorbells if len(doorbells) > 1 else (),
            digest=digest,
            ticket=ticket,
        )
        self._send(bootstrap_pb2.FromDecode(publish=message))

    def revoke(self, room: int, generation: int, failure: Failure) -> None:
        """Asks prefill to stop writing and to say so."""
        message = bootstrap_pb2.Revoke(room=room, lease_generation=generation, failure=failure_to_wire(failure))
        self._send(bootstrap_pb2.FromDecode(revoke=message))
