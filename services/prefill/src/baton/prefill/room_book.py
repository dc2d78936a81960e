"""All rooms on their way out: what is posted, how each ends, and what is said of it. Not thread safe: the exporter's lock guards it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence

from baton.engine.ports import ExportEvent, PublishedSlots, SendDone, SendFailed, SendStarted
from baton.engine.types import Failure
from baton.kvtransfer import Doorbell, InvalidArgument, PeerLost, TransferError, WriteState
from baton.prefill.failures import decode_lost, failure, objection, way_lost
from baton.prefill.link import DecodeLink
from baton.prefill.publication import Publication
from baton.prefill.room_send import HeldLayer, RoomSend
from baton.servicekit import get_logger
from baton.workerkit import PageHash

log = get_logger(__name__)


class RoomBook:
    """page_hashes: of each of our ranks' pages. layerwise: a layer is posted when it is computed, else with the last one.

    ring: called when everything of a room was posted; it makes the doorbells, where and when it likes, and gives them to `rung`.
    """

    def __init__(self, page_hashes: Sequence[PageHash], num_tombstones: int, *, layerwise: bool, ring: Callable[[RoomSend], None]) -> None:
        self._page_hashes = page_hashes
        self._num_tombstones = num_tombstones
        self._layerwise = layerwise
        self._ring_room = ring
        self._sends: dict[int, RoomSend] = {}
        self._ended: OrderedDict[int, Failure | None] = OrderedDict()
        self._events: list[ExportEvent] = []
        self.wake: Callable[[], None] = lambda: None
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sends)

    def add(self, send: RoomSend) -> None:
        self._sends[send.room] = send

    def get(self, room: int) -> RoomSend | None:
        return self._sends.get(room)

    def has_ended(self, room: int) -> bool:
        return room in self._ended

    def why_ended(self, room: int) -> Failure:
        used = failure("FAILED_PRECONDITION", "room_used", f"room={room} was used before on this server")
        return self._ended[room] or used

    def over(self, link: DecodeLink) -> Iterator[RoomSend]:
        """Rooms that are written through `link`."""
        yield from [send for send in self._sends.values() if send.publication is not None and send.publication.link is link]

    def take_events(self) -> list[ExportEvent]:
        events, self._events = self._events, []
        return events

    def match(self, send: RoomSend, publication: Publication) -> bool:
        """The room's request and a publication of it are both here. False: they have to wait, new ways to decode are on their way."""
        link = publication.link
        wrong = objection(send, publication, self._page_hashes[0].name)
        if wrong is not None:
            self.decline(publication, wrong.failure)
            if wrong.ends_room:
                self.fail(send, wrong.failure)
            return True
        try:
            send.open(publication, self._page_hashes)
        except TransferError as error:
            if link.renew():
                return False
            lost = way_lost(link, str(error)) if isinstance(error, PeerLost) else decode_lost(link, f"it cannot be written to: {error}")
            self.decline(publication, lost)
            self.fail(send, lost)
            link.fail(str(error))
            return True
        self._say(PublishedSlots(send.room, publication.resident_tokens))
        if send.first_token is not None:
            self.finish(send)
        elif self._layerwise:
            self._post_held(send)
        return True

    def hand_over(self, send: RoomSend, layer: HeldLayer) -> None:
        """A layer's pages, of a room that is not ending, to be posted now or with those that are held."""
        if send.writes and self._layerwise:
            self._post(send, layer)
        else:
            send.held.append(layer)

    def finish(self, send: RoomSend) -> None:
        """Nothing more comes: posts what is held, then rings."""
        if send.can_post:
            self._post_held(send)
        if send.can_post:
            self._begin(send)
            self._ring_room(send)

    def rung(self, send: RoomSend, doorbells: Sequence[Doorbell]) -> None:
        if send.can_post:
            try:
                send.finish(doorbells)
            except InvalidArgument as error:
                self._unwritable(send, error)

    def stop(self, send: RoomSend, why: Failure) -> None:
        """Stops posting; the room ends when its writes have. Idempotent: the first reason counts."""
        if send.ending is not None:
            return
        send.ending = why
        send.held.clear()
        if not send.writes:
            self.fail(send, why)
        elif not send.broken:
            send.cancel()

    def settle(self, send: RoomSend, publication: Publication) -> None:
        """DONE or QUIESCED on every way: nothing of this room is on its way any more."""
        why = send.ending
        if send.answer_revoke:
            publication.link.quiesced(send.room, publication.generation)
        elif send.state is WriteState.QUIESCED:
            publication.link.declined(send.room, publication.generation, why or failure("CANCELLED", "cancelled", "the transfer was cancelled"))
        if why is not None:
            self.fail(send, why)
        else:
            self._end(send, None)
            self._say(SendDone(send.room, send.stats()))

    def fail(self, send: RoomSend, why: Failure) -> None:
        """The room is over, and nothing reads its pages."""
        self._end(send, why)
        self._say(SendFailed(send.room, why))

    def bury(self, room: int, why: Failure | None) -> None:
        self._ended[room] = why
        if len(self._ended) > self._num_tombstones:
            self._ended.popitem(last=False)

    def decline(self, publication: Publication, why: Failure) -> None:
        self.counters[f"declined/{why.cause}"] += 1
        log.info("publication declined", room=publication.room, peer=publication.link.instance_id, cause=why.cause, reason=why.message)
        publication.link.declined(publication.room, publication.generation, why)

    def _post_held(self, send: RoomSend) -> None:
        held, send.held = send.held, []
        for layer in held:
            if not send.can_post:
                return  # one before it could not be written
            self._post(send, layer)

    def _post(self, send: RoomSend, layer: HeldLayer) -> None:
        try:
            posted = send.post(layer)
        except InvalidArgument as error:
            self._unwritable(send, error)
            return
        if posted:
            self._begin(send)

    def _unwritable(self, send: RoomSend, error: InvalidArgument) -> None:
        """What was published lies outside of what its decode server's invitation names: its mistake ends this room and nothing else."""
        assert send.publication is not None
        text = f"decode server {send.publication.link.instance_id} published room {send.room}: {error}"
        self.counters["unwritable"] += 1
        log.error("publication cannot be written", room=send.room, peer=send.publication.link.instance_id, reason=str(error))
        self.stop(send, failure("INVALID_ARGUMENT", "bad_publication", text, origin="decode"))

    def _begin(self, send: RoomSend) -> None:
        if not send.has_started:
            send.has_started = True
            self._say(SendStarted(send.room))

    def _end(self, send: RoomSend, why: Failure | None) -> None:
        del self._sends[send.room]
        self.bury(send.room, why)

    def _say(self, event: ExportEvent) -> None:
        self._events.append(event)
        self.wake()
