"""The two doors through which KV pages leave and enter an engine.

The engine knows no network: a service hands it an object of these shapes. Every method is called from the engine's thread, returns at once
(it never waits for a peer) and never raises for a peer's failure; what happens elsewhere is learnt from `poll`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.engine.types import Extent, Failure, Request, TransferStats


@dataclass(frozen=True, slots=True)
class PublishedSlots:
    """Decode's pages for `room` are known: its leading `resident_tokens` (whole pages) need not be written."""

    room: int
    resident_tokens: int


@dataclass(frozen=True, slots=True)
class SendStarted:
    room: int


@dataclass(frozen=True, slots=True)
class SendDone:
    """All writes were flushed and the doorbell rung. The engine may free the source pages."""

    room: int
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class SendFailed:
    """This room will not be sent (peer lost, revoked, refused). The export is closed and no write reads its pages any more:
    the engine may free the source pages. Said exactly once, also after `KVExporter.abort`."""

    room: int
    failure: Failure


ExportEvent = PublishedSlots | SendStarted | SendDone | SendFailed


class KVExporter(Protocol):
    """Prefill's side. A room lives from `expect` until `poll` returns SendDone or SendFailed for it."""

    def expect(self, request: Request) -> None:
        """The gateway asked for this room: a publication of it is awaited from now on (it may already have come)."""

    def start(self, room: int, pages: Sequence[Extent], num_tokens: int) -> None:
        """The room's source pages, in the order of the prompt. They stay pinned until SendDone or SendFailed."""

    def layer_done(self, layer: int, ranges: Sequence[tuple[int, int, int]], ready: object | None = None) -> None:
        """Layer `layer` of this chunk is computed: `ranges` are (room, first_page, num_pages) in the prompt's page order.

        `ready`: a device event that fires when the bytes are there; None when they already are. May come before the room's PublishedSlots: then
        the exporter holds it until it knows where the bytes go.
        """

    def finish(self, room: int, first_token: int) -> None:
        """The last layer of the last chunk was handed over: flush, then ring decode's doorbell with the first token."""

    def abort(self, room: int, failure: Failure) -> None:
        """Stop posting, flush what was posted, tell decode at once (negative acknowledgement). Ends with SendFailed. Idempotent."""

    def poll(self) -> list[ExportEvent]:
        """What happened since the last call."""

    def on_wake(self, wake: Callable[[], None]) -> None:
        """`wake` (thread safe, cheap) is called when `poll` has something new."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages that decode holds for one room; `pages` in the order of the prompt, enough for `num_tokens`. The first `resident_pages` have the
    leading `resident_tokens` already: others may hold them too, and nobody writes into them. Only those behind them are the room's own."""

    room: int
    pages: tuple[Extent, ...]
    num_tokens: int
    resident_tokens: int
    resident_pages: int = 0

    @property
    def num_own_pages(self) -> int:
        return sum(extent.count for extent in self.pages) - self.resident_pages


@dataclass(frozen=True, slots=True)
class Published:
    """The publication was sent."""

    room: int


@dataclass(frozen=True, slots=True)
class Landed:
    """The doorbell was seen and its room, generation, length (and digest) checked: the bytes are there.

    The lease is over; the engine owns the pages."""

    room: int
    first_token: int
    digest_checked: bool
    exposed_s: float


@dataclass(frozen=True, slots=True)
class LandingFailed:
    """The room will not land. Its pages are NOT free yet: wait for Freed."""

    room: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Freed:
    """Proof exists that nobody writes into this room's pages any more: the engine may give them back to its pool."""

    room: int


ImportEvent = Published | Landed | LandingFailed | Freed


class KVImporter(Protocol):
    """Decode's side. After `publish`, the room's pages belong to the lease until Landed or Freed."""

    def publish(self, request: Request, reservation: Reservation) -> None:
        """RESERVED -> PUBLISHED: tell the prefill server of `request.peer` where to write."""

    def abort(self, room: int, failure: Failure) -> None:
        """PUBLISHED -> ABORTING: revoke. `poll` says Freed when the writer is quiesced or fenced. Idempotent; unknown rooms are ignored."""

    def poll(self) -> list[ImportEvent]:
        """What happened since the last call."""

    def on_wake(self, wake: Callable[[], None]) -> None:
        """`wake` (thread safe, cheap) is called when `poll` has something new."""

    def quarantined_pages(self) -> int:
        """Pages whose writer neither quiesced nor is proven gone."""
