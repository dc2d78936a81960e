"""Publications whose request has not come yet, or whose way is being laid anew: bounded in number and in time. Pure; not thread safe."""

from __future__ import annotations

from collections import OrderedDict

from baton.prefill.link import DecodeLink
from baton.prefill.publication import Publication


class Unmatched:
    """Oldest first. Several decode servers may publish one room: which of them is right is known only when the request comes.

    capacity: how many may wait. timeout_s: how long one may wait.
    """

    def __init__(self, capacity: int, timeout_s: float) -> None:
        self.capacity = capacity
        self.timeout_s = timeout_s
        self._waiting: OrderedDict[tuple[int, str], tuple[float, Publication]] = OrderedDict()
        self._publishers: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def has(self, publication: Publication) -> bool:
        """Whether this decode server published this room already."""
        return (publication.room, publication.link.instance_id) in self._waiting

    def first_publisher(self, room: int) -> str:
        """The decode server whose publication of this room has waited longest; "": there is none."""
        return next(iter(self._publishers.get(room, ())), "")

    def put(self, publication: Publication, now: float) -> bool:
        """False when there is no place. `now`: on time.monotonic()."""
        if len(self._waiting) >= self.capacity:
            return False
        publisher = publication.link.instance_id
        self._waiting[publication.room, publisher] = (now + self.timeout_s, publication)
        self._publishers.setdefault(publication.room, []).append(publisher)
        return True

    def take(self, room: int) -> list[Publication]:
        """Takes out all publications of a room."""
        return [self._pop(room, publisher) for publisher in list(self._publishers.get(room, ()))]

    def drop(self, room: int, link: DecodeLink, generation: int) -> None:
        """Forgets a publication, if it is this one."""
        found = self._waiting.get((room, link.instance_id))
        if found is not None and found[1].link is link and found[1].generation == generation:
            self._pop(room, link.instance_id)

    def of(self, link: DecodeLink) -> list[Publication]:
        """They stay."""
        return [publication for _, publication in self._waiting.values() if publication.link is link]

    def drop_all(self, link: DecodeLink) -> None:
        for publication in self.of(link):
            self._pop(publication.room, link.instance_id)

    def expired(self, now: float) -> list[Publication]:
        """Takes out what waited too long."""
        gone: list[Publication] = []
        while self._waiting:
            due, publication = next(iter(self._waiting.values()))
            if due > now:
                break
            gone.append(self._pop(publication.room, publication.link.instance_id))
        return gone

    def _pop(self, room: int, publisher: str) -> Publication:
        publishers = self._publishers[room]
        publishers.remove(publisher)
        if not publishers:
            del self._publishers[room]
        return self._waiting.pop((room, publisher))[1]
