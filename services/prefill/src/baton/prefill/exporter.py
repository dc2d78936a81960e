"""KV pages on their way out: the engine's door, the bootstrap endpoint and the transfer library meet here.

Three threads come in: the engine's (KVExporter), the event loop's (publications, revocations) and the transfer library's notifiers (ends of
writes). One lock guards the rooms; nothing under it waits for a peer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.engine.layout import KVLayout
from baton.engine.ports import ExportEvent
from baton.engine.types import Extent, Failure, Request
from baton.kvtransfer import WriteHandle, WriteState
from baton.prefill.errors import BadPublicationError
from baton.prefill.failures import decode_lost, failure, way_lost
from baton.prefill.link import DecodeLink
from baton.prefill.publication import Publication
from baton.prefill.room_book import RoomBook
from baton.prefill.room_send import HeldLayer, RoomSend
from baton.prefill.unmatched import Unmatched
from baton.servicekit import get_logger
from baton.workerkit import PageHash, PrefillPeer

log = get_logger(__name__)

#: Each launch takes the host a tenth of a millisecond; what the last one reads is all that a room waits for at its end.
LAYERS_DIGESTED_AT_ONCE = 8


class Exporter:
    """Implements the engine's KVExporter over kvtransfer. Close it after the engine stopped.

    layout: of one rank's pool. page_hashes: of each rank's. layerwise: a layer is posted when it is computed; else all layers when the prompt is
    (what a hand-over without overlap costs).
    """

    def __init__(
        self,
        layout: KVLayout,
        page_hashes: Sequence[PageHash],
        *,
        unmatched_timeout_s: float,
        max_unmatched: int,
        num_tombstones: int = 65_536,
        layerwise: bool = True,
    ) -> None:
        self._layout = layout
        self._lock = threading.RLock()
        self._rooms = RoomBook(page_hashes, num_tombstones, layerwise=layerwise, ring=self._ring)
        self._unmatched = Unmatched(max_unmatched, unmatched_timeout_s)
        self._on_unclaimed: Callable[[int, str], None] = lambda room, decode_instance_id: None
        self._on_digest: Callable[[float], None] = lambda waited_s: None
        self._digests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")

    @property
    def counters(self) -> Counter[str]:
        return self._rooms.counters

    # --- the engine's thread --------------------------------------------------------------------------------------------------

    def expect(self, request: Request) -> None:
        peer = request.peer
        assert isinstance(peer, PrefillPeer)
        with self._lock:
            send = RoomSend(request.room, peer.decode_instance_id, len(request.prompt), self._layout)
            self._rooms.add(send)
            for publication in self._unmatched.take(request.room):
                self._match(send, publication)

    def start(self, room: int, pages: Sequence[Extent], num_tokens: int) -> None:
        with self._lock:
            send = self._rooms.get(room)
            if send is not None:
                send.set_source(pages)

    def layer_done(self, layer: int, ranges: Sequence[tuple[int, int, int]], ready: object | None = None) -> None:
        events = _cuda_events(ready)
        now = time.monotonic_ns()
        with self._lock:
            for room, first, count in ranges:
                send = self._rooms.get(room)
                if send is None or send.ending is not None or send.broken:
                    continue
                send.last_layer_ns = now
                if ready is not None:
                    send.events.append(ready)
                self._rooms.hand_over(send, HeldLayer(layer, first, count, events))
                if ready is not None:
                    self._digest_ahead(send, layer, first, count, ready)

    def finish(self, room: int, first_token: int) -> None:
        with self._lock:
            send = self._rooms.get(room)
            if send is None or send.ending is not None:
                return
            send.first_token = first_token
            if send.events or not send.last_layer_ns:
                # A device's layers were only launched when they were handed over; or every page was resident and none was.
                send.last_layer_ns = time.monotonic_ns()
            self._rooms.finish(send)

    def abort(self, room: int, failure: Failure) -> None:
        with self._lock:
            send = self._rooms.get(room)
            if send is not None:
                self._rooms.stop(send, failure)

    def poll(self) -> list[ExportEvent]:
        with self._lock:
            return self._rooms.take_events()

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._rooms.wake = wake

    # --- the event loop -------------------------------------------------------------------------------------------------------

    def published(self, publication: Publication) -> None:
        """A decode server told where to write: now, early, or too late."""
        room = publication.room
        with self._lock:
            send = self._rooms.get(room)
            if send is not None:
                self._match(send, publication)
            elif self._rooms.has_ended(room):
                self._rooms.decline(publication, self._rooms.why_ended(room))
            elif self._unmatched.has(publication):
                self._rooms.decline(publication, failure("ALREADY_EXISTS", "published_twice", f"room {room} was published before"))
            elif self._put_aside(publication) is None:
                self._on_unclaimed(room, publication.link.instance_id)

    def publisher(self, room: int) -> str:
        """The decode server that published this room first, of those whose publication awaits its request; "": none does."""
        with self._lock:
            return self._unmatched.first_publisher(room)

    def on_unclaimed(self, tell: Callable[[int, str], None]) -> None:
        """`tell` gets the room and the decode instance of every publication that has to await its request. It must not wait: it is under the lock."""
        self._on_unclaimed = tell

    def on_digest(self, tell: Callable[[float], None]) -> None:
        """`tell` gets the seconds that a room waited for its digest, before its doorbell was given away. Any thread; it must not wait."""
        self._on_digest = tell

    def reject(self, link: DecodeLink, room: int, generation: int, error: BadPublicationError) -> None:
        """A publication that cannot be written: decode is told; so is the engine, if the room is this decode server's."""
        why = failure("INVALID_ARGUMENT", error.cause, f"decode server {link.instance_id} published room {room}: {error}", origin="decode")
        with self._lock:
            self.counters[f"declined/{why.cause}"] += 1
            log.error("publication declined", room=room, peer=link.instance_id, cause=why.cause, reason=why.message)
            link.declined(room, generation, why)
            send = self._rooms.get(room)
            if send is not None and send.publication is None and send.decode_instance_id == link.instance_id:
                self._rooms.stop(send, why)

    def turn_away(self, link: DecodeLink, room: int, generation: int, failure: Failure) -> None:
        """A publication by somebody who may not publish it: only they are told, and the room waits on for whoever may."""
        text = f"decode server {link.instance_id} published room {room}: it {failure.message}"
        told = Failure(failure.code, failure.origin, failure.cause, text)
        with self._lock:
            self.counters[f"declined/{failure.cause}"] += 1
            log.warning("publication turned away", room=room, peer=link.instance_id, cause=told.cause, reason=told.message)
            link.declined(room, generation, told)

    def revoked(self, link: DecodeLink, room: int, generation: int, failure: Failure) -> None:
        """Decode wants its pages back: stop, flush, then say Quiesced; at once where nothing is being written."""
        with self._lock:
            self.counters["revoked"] += 1
            send = self._rooms.get(room)
            publication = send.publication if send is not None else None
            if send is not None and publication is not None and (publication.link is link and publication.generation == generation):
                send.answer_revoke = True
                self._rooms.stop(send, failure)
                return
            self._unmatched.drop(room, link, generation)
            link.quiesced(room, generation)

    def refuse(self, room: int, failure: Failure) -> None:
        """The gateway's request for this room was refused at intake: whoever published it, or will, is told."""
        with self._lock:
            if self._rooms.get(room) is not None or self._rooms.has_ended(room):
                return
            self._rooms.bury(room, failure)
            for publication in self._unmatched.take(room):
                self._rooms.decline(publication, failure)

    def expire(self, now: float) -> None:
        """Declines publications whose request never came. Called on a clock, `now` on time.monotonic()."""
        with self._lock:
            for publication in self._unmatched.expired(now):
                text = f"no gateway asked for room {publication.room} within {self._unmatched.timeout_s:g} s (--unmatched-timeout-s)"
                self._rooms.decline(publication, failure("DEADLINE_EXCEEDED", "room_unclaimed", text))

    def link_renewed(self, link: DecodeLink) -> None:
        """The link has new ways: what waited for them goes on."""
        with self._lock:
            for publication in self._unmatched.of(link):
                send = self._rooms.get(publication.room)
                if send is None and not self._rooms.has_ended(publication.room):
                    continue  # its request has not come yet
                self._unmatched.drop(publication.room, link, publication.generation)
                if send is not None:
                    self._match(send, publication)
                else:
                    self._rooms.decline(publication, self._rooms.why_ended(publication.room))

    def link_closing(self, link: DecodeLink, reason: str, *, way_broke: bool = False) -> None:
        """The session is over: everything that writes through `link` stops. way_broke: decode is there; it cannot be written to."""
        why = way_lost(link, reason) if way_broke else decode_lost(link, reason)
        with self._lock:
            waiting = [self._rooms.get(publication.room) for publication in self._unmatched.of(link)]
            self._unmatched.drop_all(link)
            for send in [*self._rooms.over(link), *(send for send in waiting if send is not None)]:
                self._rooms.stop(send, why)

    def link_closed(self, link: DecodeLink) -> None:
        """The peer is closed: nothing of it reads source pages any more, whatever became of its writes."""
        with self._lock:
            for send in self._rooms.over(link):
                self._rooms.fail(send, send.ending or decode_lost(link))

    @property
    def num_rooms(self) -> int:
        with self._lock:
            return len(self._rooms)

    @property
    def num_unmatched(self) -> int:
        with self._lock:
            return len(self._unmatched)

    def close(self) -> None:
        """Waits for digests that are being computed. Idempotent."""
        self._digests.shutdown()

    # --- the transfer library's notifiers --------------------------------------------------------------------------------------

    def write_ended(self, handle: WriteHandle) -> None:
        """A handle's state is final."""
        with self._lock:
            send = self._rooms.get(handle.room)
            if send is None or send.publication is None or send.broken or not send.owns(handle):
                return
            if handle.state is WriteState.FAILED:
                # What was posted may still land: decode must fence this session, and only its end is proof that we read no more.
                send.broken = True
                self.counters["write_failed"] += 1
                send.publication.link.fail(f"writes of room {send.room} failed: {handle.error}")
            elif send.state is not WriteState.OPEN:
                self._rooms.settle(send, send.publication)

    # --- publications ----------------------------------------------------------------------------------------------------------

    def _match(self, send: RoomSend, publication: Publication) -> None:
        """Under the lock. Where new ways to decode are on their way, the publication waits for them."""
        if self._unmatched.has(publication):
            self._rooms.decline(publication, failure("ALREADY_EXISTS", "published_twice", f"room {send.room} was published before"))
        elif not self._rooms.match(send, publication) and (full := self._put_aside(publication)) is not None:
            self._rooms.fail(send, full)

    def _put_aside(self, publication: Publication) -> Failure | None:
        """Under the lock. Until something comes that it waits for; declined, with what is returned, where too many wait."""
        if self._unmatched.put(publication, time.monotonic()):
            return None
        text = f"{len(self._unmatched)} published rooms await their request, the limit is {self._unmatched.capacity} (--max-unmatched)"
        full = failure("RESOURCE_EXHAUSTED", "too_many_unmatched", text)
        self._rooms.decline(publication, full)
        return full

    # --- doorbells -------------------------------------------------------------------------------------------------------------

    def _ring(self, send: RoomSend) -> None:
        """Under the lock. Digests are computed on a thread of their own; those that are there already wait for no thread, and for no other room's."""
        assert send.publication is not None
        if not send.publication.digest:
            self._rooms.rung(send, send.doorbells())
        elif self._digests_are_ready(send):
            self._digest_and_ring(send, time.monotonic())
        else:
            self._digests.submit(self._digest_and_ring, send, time.monotonic())

    def _digests_are_ready(self, send: RoomSend) -> bool:
        """Under the lock. A device that fails says so here too: then the digests' thread hears it again, and ends the room."""
        try:
            return send.digests_are_ready()
        except Exception:
            log.exception("digest failed", room=send.room)
            return False

    def _digest_ahead(self, send: RoomSend, layer: int, first: int, count: int, ready: object) -> None:
        """Under the lock. Device memory is read for the digest while later layers are computed, several layers at a time."""
        begin, is_last = send.undigested_layer, layer == self._layout.num_layers - 1
        if not is_last and layer + 1 - begin < LAYERS_DIGESTED_AT_ONCE:
            return
        send.undigested_layer = 0 if is_last else layer + 1
        if send.can_post and send.publication is not None and send.publication.digest:
            of_ranks = ready if isinstance(ready, tuple) else (ready,)
            send.reading = self._digests.submit(self._try_ahead, send, range(begin, layer + 1), first, count, of_ranks)

    def _try_ahead(self, send: RoomSend, layers: range, first: int, count: int, ready: tuple[object, ...]) -> None:
        """On the digest's thread. Pages of a room that has been stopped meanwhile may be others' by now: nobody asks for that digest any more."""
        try:
            send.digest_ahead(layers, first, count, ready)
        except Exception as error:
            self._digest_failed(send, error)

    def _digest_and_ring(self, send: RoomSend, since: float) -> None:
        """On the digest's thread, or where it is done with them: the source pages stay pinned until the writes are over, so they can be read without
        the lock."""
        try:
            doorbells = send.doorbells()
            with self._lock:
                self._rooms.rung(send, doorbells)
            self._on_digest(time.monotonic() - since)
        except Exception as error:
            self._digest_failed(send, error)

    def _digest_failed(self, send: RoomSend, error: Exception) -> None:
        log.exception("digest failed", room=send.room)
        with self._lock:
            self._rooms.stop(send, failure("INTERNAL", "digest_failed", f"room {send.room}: {error}"))


def _cuda_events(ready: object | None) -> tuple[int, ...]:
    """Of each rank, as the transfer library takes them; none where nothing is to be waited for."""
    if ready is None:
        return ()
    events = ready if isinstance(ready, tuple) else (ready,)
    return tuple(int(event.cuda_event) for event in events)  # torch.cuda.Event, which this room does not import
