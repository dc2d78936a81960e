"""Opens a place for every worker that is named, and lets those go that are named no more, once their rooms have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton.gateway.discovery.membership import Membership
from baton.gateway.fleet import Fleet
from baton.gateway.worker import Leg, Worker
from baton.gateway.worker_session import WorkerSession
from baton.servicekit import get_logger

log = get_logger(__name__)


@dataclass(slots=True)
class _Place:
    worker: Worker
    session: asyncio.Task[None]
    #: Set once nothing runs there any more and it is being closed.
    closing: asyncio.Task[None] | None = None


class Places:
    """Follows `membership`: call `sync` whenever that has changed. Lives on the event loop; owns every worker's session.

    A worker that is named no more takes no new rooms, keeps its session while it has rooms, and is then dropped from the fleet. Named again
    before that, it stays.
    """

    def __init__(
        self,
        membership: Membership,
        fleet: Fleet,
        make: Callable[[str, Leg], tuple[Worker, WorkerSession]],
        on_failure: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """make: a worker and what keeps it connected. on_failure: told of a session whose task ended, which none ever should."""
        self.membership = membership
        #: ("joined" | "left" | "removed", role) -> how many.
        self.counters: Counter[tuple[str, str]] = Counter()
        self._fleet = fleet
        self._make = make
        self._on_failure = on_failure
        self._places: dict[str, _Place] = {}
        self._closed = False

    def sync(self) -> None:
        """Makes the fleet what the membership says."""
        if self._closed:
            return
        wanted = self.membership.places()
        going = [address for address, place in self._places.items() if wanted.get(address) is not place.worker.leg]
        for address, reason in self.membership.why_gone(going).items():
            self._let_go(self._places[address], f"it is a {wanted[address].value} server now" if address in wanted else reason)
        for address, leg in wanted.items():
            place = self._places.get(address)
            if place is None:
                self._open(address, leg)
            elif place.worker.leg is leg and place.worker.leaving and place.closing is None:
                log.info("worker stays", address=address, worker=place.worker.instance_id, was_leaving_because=place.worker.leaving)
                place.worker.stay()

    def end_rooms(self, address: str) -> None:
        """What still runs at a place that is going ends now; what may be tried on other servers is."""
        place = self._places.get(address)
        if place is not None and place.worker.leaving:
            place.worker.went(f"it was taken out of the fleet: {place.worker.leaving}")

    def find(self, address: str) -> Worker | None:
        place = self._places.get(address)
        return None if place is None else place.worker

    async def close(self) -> None:
        """Ends every session at once."""
        self._closed = True
        tasks = [place.session for place in self._places.values()]
        tasks += [place.closing for place in self._places.values() if place.closing is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, address: str, leg: Leg) -> None:
        worker, session = self._make(address, leg)
        task = asyncio.create_task(session.run(), name=f"session with {leg.value} {address}")
        task.add_done_callback(self._on_failure)
        self._places[address] = _Place(worker, task)
        self.counters["joined", leg.value] += 1
        log.info("worker joins", role=leg.value, address=address, sources=self.membership.sources(address))
        self._fleet.add(worker)

    def _let_go(self, place: _Place, reason: str) -> None:
        worker = place.worker
        if worker.leaving:
            return
        log.info("worker leaves", role=worker.leg.value, address=worker.address, worker=worker.instance_id, reason=reason, rooms=worker.num_rooms)
        self.counters["left", worker.leg.value] += 1
        worker.leave(reason, self._empty)

    def _empty(self, worker: Worker) -> None:
        """A place that is going has no room any more. The session's end also ends what an abort on its way would have ended there."""
        place = self._places[worker.address]
        place.closing = asyncio.create_task(self._close(place), name=f"end of {worker.address}")
        place.closing.add_done_callback(self._on_failure_only)

    async def _close(self, place: _Place) -> None:
        worker = place.worker
        place.session.remove_done_callback(self._on_failure)
        place.session.cancel()
        await asyncio.gather(place.session, return_exceptions=True)
        worker.went("it left the fleet")
        del self._places[worker.address]
        self.counters["removed", worker.leg.value] += 1
        log.info("worker left", role=worker.leg.value, address=worker.address, worker=worker.instance_id)
        self._fleet.drop(worker)
        self.sync()

    def _on_failure_only(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._on_failure(task)
