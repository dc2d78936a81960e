"""KV pages on their way out: the engine's door, the bootstrap endpoint and the transfer library meet here.

Three threads come in: the engine's (KVExporter), the event loop's (publications, revocations) and the transfer library's notifier (ends of
writes). One lock guards the rooms; nothing under it waits for a peer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.engine.layout import KVLayout
from baton.engine.ports import ExportEvent, PublishedSlots, SendDone, SendFailed, SendStarted
from baton.engine.types import Extent, Failure, Request
from baton.kvtransfer import InvalidArgument, TransferError, WriteHandle, WriteState
from baton.prefill.errors import BadPublicationError
from baton.prefill.link import DecodeLink
from baton.prefill.publication import Publication
from baton.prefill.room_send import RoomSend
from baton.prefill.unmatched import Unmatched
from baton.servicekit import get_logger
from baton.workerkit import PageHash, PrefillPeer

log = get_logger(__name__)


class Exporter:
    """Implements the engine's KVExporter over kvtransfer. Close it after the engine stopped.

    layerwise: a layer is posted when it is computed; else all layers when the prompt is (what a hand-over without overlap costs).
    """

    def __init__(
        self,
        layout: KVLayout,
        page_hash: PageHash,
        *,
        unmatched_timeout_s: float,
        max_unmatched: int,
        num_tombstones: int = 65_536,
        layerwise: bool = True,
    ) -> None:
        self._layerwise = layerwise
        self._layout = layout
        self._page_hash = page_hash
        self._lock = threading.RLock()
        self._sends: dict[int, RoomSend] = {}
        self._unmatched = Unmatched(max_unmatched, unmatched_timeout_s)
        self._ended: OrderedDict[int, Failure | None] = OrderedDict()
        self._num_tombstones = num_tombstones
        self._events: list[ExportEvent] = []
        self._wake: Callable[[], None] = lambda: None
        self._digests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest")
        self.counters: Counter[str] = Counter()

    # --- the engine's thread --------------------------------------------------------------------------------------------------

    def expect(self, request: Request) -> None:
        peer = request.peer
        assert isinstance(peer, PrefillPeer)
        with self._lock:
            send = RoomSend(request.room, peer.decode_instance_id, len(request.prompt), self._layout)
            self._sends[request.room] = send
            for publication in self._unmatched.take(request.room):
                self._match(send, publication)

    def start(self, room: int, pages: Sequence[Extent], num_tokens: int) -> None:
        with self._lock:
            send = self._sends.get(room)
            if send is not None:
                send.set_source(pages)

    def layer_done(self, layer: int, ranges: Sequence[tuple[int, int, int]], ready: object | None = None) -> None:
        event = None if ready is None else int(ready.cuda_event)  # type: ignore[attr-defined]  # torch.cuda.Event, which this room does not import
        now = time.monotonic_ns()
        with self._lock:
            for room, first, count in ranges:
                send = self._sends.get(room)
                if send is None or send.ending is not None or send.broken:
                    continue
                send.last_layer_ns = now
                if ready is not None:
                    send.events.append(ready)
                if send.handle is None or not self._layerwise:
                    send.held.append((layer, first, count, event))
                else:
                    self._post(send, layer, first, count, event)

    def finish(self, room: int, first_token: int) -> None:
        with self._lock:
            send = self._sends.get(room)
            if send is None or send.ending is not None:
                return
            send.first_token = first_token
            if send.events or not send.last_layer_ns:
                # A device's layers were only launched when they were handed over; or every page was resident and none was.
                send.last_layer_ns = time.monotonic_ns()
            if send.can_post:
                self._post_held(send)
            if send.can_post:
                self._ring(send)

    def abort(self, room: int, failure: Failure) -> None:
        with self._lock:
            send = self._sends.get(room)
            if send is not None:
                self._stop(send, failure)

    def poll(self) -> list[ExportEvent]:
        with self._lock:
            events, self._events = self._events, []
            return events

    def on_wake(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # --- the event loop -------------------------------------------------------------------------------------------------------

    def published(self, publication: Publication) -> None:
        """A decode server told where to write: now, early, or too late."""
        room = publication.room
        with self._lock:
            send = self._sends.get(room)
            if send is not None:
                self._match(send, publication)
            elif room in self._ended:
                used = _failure("FAILED_PRECONDITION", "room_used", f"room={room} was used before on this server")
                self._decline(publication, self._ended[room] or used)
            elif self._unmatched.has(publication):
                self._decline(publication, _failure("ALREADY_EXISTS", "published_twice", f"room {room} was published before"))
            elif not self._unmatched.put(publication, time.monotonic()):
                text = f"{len(self._unmatched)} published rooms await their request, the limit is {self._unmatched.capacity} (--max-unmatched)"
                self._decline(publication, _failure("RESOURCE_EXHAUSTED", "too_many_unmatched", text))

    def reject(self, link: DecodeLink, room: int, generation: int, error: BadPublicationError) -> None:
        """A publication that cannot be written: decode is told; so is the engine, if the room is this decode server's."""
        failure = _failure("INVALID_ARGUMENT", error.cause, f"decode server {link.instance_id} published room {room}: {error}", origin="decode")
        with self._lock:
            self.counters[f"declined/{failure.cause}"] += 1
            log.error("publication declined", room=room, peer=link.instance_id, cause=failure.cause, reason=failure.message)
            link.declined(room, generation, failure)
            send = self._sends.get(room)
            if send is not None and send.publication is None and send.decode_instance_id == link.instance_id:
                self._stop(send, failure)

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
            send = self._sends.get(room)
            publication = send.publication if send is not None else None
            if send is not None and publication is not None and (publication.link is link and publication.generation == generation):
                send.answer_revoke = True
                self._stop(send, failure)
                return
            self._unmatched.drop(room, link, generation)
            link.quiesced(room, generation)

    def refuse(self, room: int, failure: Failure) -> None:
        """The gateway's request for this room was refused at intake: whoever published it, or will, is told."""
        with self._lock:
            if room in self._sends or room in self._ended:
                return
            self._bury(room, failure)
            for publication in self._unmatched.take(room):
                self._decline(publication, failure)

    def expire(self, now: float) -> None:
        """Declines publications whose request never came. Called on a clock, `now` on time.monotonic()."""
        with self._lock:
            for publication in self._unmatched.expired(now):
                text = f"no gateway asked for room {publication.room} within {self._unmatched.timeout_s:g} s (--unmatched-timeout-s)"
                self._decline(publication, _failure("DEADLINE_EXCEEDED", "room_unclaimed", text))

    def link_closing(self, link: DecodeLink, reason: str) -> None:
        """The session is over: everything that writes through `link` stops."""
        with self._lock:
            self._unmatched.drop_all(link)
            for send in self._of(link):
                self._stop(send, _failure("UNAVAILABLE", "decode_lost", f"decode server {link.instance_id} is gone: {reason}", origin="decode"))

    def link_closed(self, link: DecodeLink) -> None:
        """The peer is closed: nothing of it reads source pages any more, whatever became of its writes."""
        with self._lock:
            for send in self._of(link):
                failure = send.ending or _failure("UNAVAILABLE", "decode_lost", f"decode server {link.instance_id} is gone", origin="decode")
                self._end(send, failure)
                self._say(SendFailed(send.room, failure))

    @property
    def num_rooms(self) -> int:
        with self._lock:
            return len(self._sends)

    @property
    def num_unmatched(self) -> int:
        with self._lock:
            return len(self._unmatched)

    def close(self) -> None:
        """Waits for digests that are being computed. Idempotent."""
        self._digests.shutdown()

    # --- the transfer library's notifier ---------------------------------------------------------------------------------------

    def write_ended(self, handle: WriteHandle) -> None:
        """A handle's state is final."""
        with self._lock:
            send = self._sends.get(handle.room)
            if send is None or send.handle is not handle or send.publication is None:
                return
            if handle.state is WriteState.FAILED:
                # What was posted may still land: decode must fence this session, and only its end is proof that we read no more.
                send.broken = True
                self.counters["write_failed"] += 1
                send.publication.link.fail(f"writes of room {send.room} failed: {handle.error}")
                return
            self._settle(send, send.publication, handle.state)

    # --- inside, under the lock --------------------------------------------------------------------------------------------------

    def _match(self, send: RoomSend, publication: Publication) -> None:
        room, link = send.room, publication.link
        if link.instance_id != send.decode_instance_id:
            text = f"room {room} belongs to decode server {send.decode_instance_id}, it was published by {link.instance_id}"
            self._decline(publication, _failure("PERMISSION_DENIED", "wrong_decode", text))
            return
        if send.publication is not None or send.ending is not None:
            self._decline(publication, send.ending or _failure("ALREADY_EXISTS", "published_twice", f"room {room} was published before"))
            return
        if publication.num_tokens != send.num_tokens:
            text = f"room {room}: decode published {publication.num_tokens} tokens, the gateway sent a prompt of {send.num_tokens}"
            self._refuse_both(send, publication, _failure("INTERNAL", "length_mismatch", text))
            return
        if publication.digest and link.page_hash != self._page_hash.name:
            text = f"room {room}: decode compares digests of kind {link.page_hash!r}, this server computes {self._page_hash.name!r} (its pages "
            text += "lie in another kind of memory): start decode with --digest=off"
            self._refuse_both(send, publication, _failure("FAILED_PRECONDITION", "page_hash", text))
            return
        try:
            send.handle = link.peer.begin(room)
        except TransferError as error:
            text = f"decode server {link.instance_id} cannot be written to: {error}"
            self._refuse_both(send, publication, _failure("UNAVAILABLE", "decode_lost", text, origin="decode"))
            link.fail(str(error))
            return
        send.publication = publication
        self._say(PublishedSlots(room, publication.resident_tokens))
        if self._layerwise or send.first_token is not None:
            self._post_held(send)
        if send.first_token is not None and send.can_post:
            self._ring(send)

    def _refuse_both(self, send: RoomSend, publication: Publication, failure: Failure) -> None:
        self._decline(publication, failure)
        self._end(send, failure)
        self._say(SendFailed(send.room, failure))

    def _post_held(self, send: RoomSend) -> None:
        held, send.held = send.held, []
        for layer, first, count, event in held:
            self._post(send, layer, first, count, event)

    def _post(self, send: RoomSend, layer: int, first: int, count: int, event: int | None) -> None:
        if not send.can_post:
            return  # one before it could not be written
        try:
            posted = send.post(layer, first, count, event)
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
        self._stop(send, _failure("INVALID_ARGUMENT", "bad_publication", text, origin="decode"))

    def _begin(self, send: RoomSend) -> None:
        if not send.has_started:
            send.has_started = True
            self._say(SendStarted(send.room))

    def _ring(self, send: RoomSend) -> None:
        assert send.publication is not None
        send.is_finished = True
        self._begin(send)
        if send.publication.digest:
            self._digests.submit(self._digest_and_finish, send)
        else:
            self._finish_handle(send, None)

    def _digest_and_finish(self, send: RoomSend) -> None:
        """On the digest's thread: the source pages stay pinned until the writes are over, so they can be read without the lock."""
        try:
            self._finish_handle(send, self._page_hash)
        except Exception as error:
            log.exception("digest failed", room=send.room)
            with self._lock:
                self._stop(send, _failure("INTERNAL", "digest_failed", f"room {send.room}: {error}"))

    def _finish_handle(self, send: RoomSend, page_hash: PageHash | None) -> None:
        doorbell = send.doorbell(page_hash)
        with self._lock:
            if send.can_post and send.handle is not None and send.publication is not None:
                try:
                    send.handle.finish(send.publication.doorbell, doorbell)
                except InvalidArgument as error:
                    self._unwritable(send, error)

    def _stop(self, send: RoomSend, failure: Failure) -> None:
        """Stops posting; the room ends when its writes have. Idempotent: the first reason counts."""
        if send.ending is not None:
            return
        send.ending = failure
        send.held.clear()
        if send.handle is None:
            self._end(send, failure)
            self._say(SendFailed(send.room, failure))
        elif not send.broken:
            send.handle.cancel()

    def _settle(self, send: RoomSend, publication: Publication, state: WriteState) -> None:
        """DONE or QUIESCED: nothing of this room is on its way any more."""
        failure = send.ending
        self._end(send, failure)
        if send.answer_revoke:
            publication.link.quiesced(send.room, publication.generation)
        elif state is WriteState.QUIESCED:
            publication.link.declined(send.room, publication.generation, failure or _failure("CANCELLED", "cancelled", "the transfer was cancelled"))
        if failure is None:
            self._say(SendDone(send.room, send.stats()))
        else:
            self._say(SendFailed(send.room, failure))

    def _end(self, send: RoomSend, failure: Failure | None) -> None:
        del self._sends[send.room]
        self._bury(send.room, failure)

    def _bury(self, room: int, failure: Failure | None) -> None:
        self._ended[room] = failure
        if len(self._ended) > self._num_tombstones:
            self._ended.popitem(last=False)

    def _decline(self, publication: Publication, failure: Failure) -> None:
        self.counters[f"declined/{failure.cause}"] += 1
        log.info("publication declined", room=publication.room, peer=publication.link.instance_id, cause=failure.cause, reason=failure.message)
        publication.link.declined(publication.room, publication.generation, failure)

    def _of(self, link: DecodeLink) -> list[RoomSend]:
        return [send for send in self._sends.values() if send.publication is not None and send.publication.link is link]

    def _say(self, event: ExportEvent) -> None:
        self._events.append(event)
        self._wake()


def _failure(code: str, cause: str, message: str, *, origin: str = "prefill") -> Failure:
    return Failure(code, origin, cause, message)
