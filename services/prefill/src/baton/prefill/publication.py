"""What a decode server published for one room: where to write, under which lease."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.types import Extent
from baton.kvtransfer import page_ids
from baton.kvtransfer.spans import PageArray
from baton.prefill.errors import BadPublicationError
from baton.prefill.link import DecodeLink
from baton.wire.v1 import bootstrap_pb2


@dataclass(frozen=True, slots=True)
class Publication:
    """pages: destination page ids, int64, in prompt order, as many as `num_tokens` need. resident_pages: leading ones that must not be written.
    doorbells: one for each of the link's ways, in their order."""

    room: int
    generation: int
    link: DecodeLink
    pages: PageArray
    num_tokens: int
    resident_tokens: int
    doorbells: tuple[int, ...]
    digest: bool

    @property
    def resident_pages(self) -> int:
        return self.resident_tokens // self.link.layout.page_size


def read_publication(message: bootstrap_pb2.Publish, link: DecodeLink) -> Publication:
    """Checks what a decode server sent; raises BadPublicationError that names field, value and limit."""
    layout = link.layout
    if message.room == 0 or message.lease_generation == 0:
        raise BadPublicationError("bad_publication", f"room={message.room}, lease_generation={message.lease_generation}: both must be at least 1")
    needed = layout.pages_for(message.num_tokens)
    given = sum(extent.count for extent in message.pages)
    if message.num_tokens == 0 or given < needed:
        raise BadPublicationError("bad_publication", f"pages holds {given} pages, num_tokens={message.num_tokens} needs {max(needed, 1)}")
    if given > layout.num_pages:  # before anything as long as that is made of them
        raise BadPublicationError("bad_publication", f"pages holds {given} pages, the pool has {layout.num_pages}")
    for extent in message.pages:
        if extent.first + extent.count > layout.num_pages:
            end = extent.first + extent.count
            raise BadPublicationError("bad_publication", f"pages [{extent.first}, {end}) is outside the pool of {layout.num_pages} pages")
    if message.resident_tokens > message.num_tokens or message.resident_tokens % layout.page_size:
        limit = f"a multiple of the page size {layout.page_size} and at most num_tokens={message.num_tokens}"
        raise BadPublicationError("bad_publication", f"resident_tokens={message.resident_tokens} must be {limit}")
    doorbells = tuple(message.doorbells) or (message.doorbell,)
    if len(doorbells) != len(link.ways):
        limit = f"this pair has {len(link.ways)} routes, each of which rings its own"
        raise BadPublicationError("bad_publication", f"doorbells holds {len(doorbells)} slots: {limit}")
    pages = page_ids((extent.first, extent.count) for extent in message.pages)[:needed]
    return Publication(
        room=message.room,
        generation=message.lease_generation,
        link=link,
        pages=pages,
        num_tokens=message.num_tokens,
        resident_tokens=message.resident_tokens,
        doorbells=doorbells,
        digest=message.digest,
    )


def extents_to_ids(extents: tuple[Extent, ...]) -> PageArray:
    return page_ids((extent.first, extent.count) for extent in extents)
