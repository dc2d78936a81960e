"""Which counters of which service a fault moves: scraped before it, and when all that it does is done."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

from fleet import Worker, wait_for
from prometheus import scrape

#: What says that something went wrong. Everything else counts work that goes on.
FAULTY = (
    "baton_bootstrap_failed_total",
    "baton_rooms_failed_total",
    "baton_transfer_failed_total",
    "baton_requests_refused_total",
    "baton_rooms_refused_total",
    "baton_rooms_retried_total",
    "baton_streams_continued_total",
    "baton_retractions_total",
    "baton_tokens_recomputed_total",
    "baton_publications_declined_total",
    "baton_writes_failed_total",
    "baton_leases_quarantined_total",
    "baton_revokes_overdue_total",
)
BY_STATE = {"BOOTSTRAPPING": "baton_bootstrap_failed_total", "WAITING": "baton_transfer_failed_total", "TRANSFERRING": "baton_transfer_failed_total"}

Moved = Counter[tuple[str, str, str]]


@dataclass
class Scrapes:
    """Of the services that are up: (service, counter, "cause (origin)" or "") -> by how much it has grown since this was made."""

    services: dict[str, Worker]
    before: dict[str, Moved] = field(init=False)

    def __post_init__(self) -> None:
        self.before = {name: counts(worker) for name, worker in self.services.items()}

    def moved(self, *but: str) -> Moved:
        """but: services that a fault has ended: who starts anew counts anew."""
        grown: Moved = Counter()
        for name, worker in self.services.items():
            if name not in but:
                for (_, counter, why), count in (counts(worker) - self.before[name]).items():
                    grown[name, counter, why] += count
        return grown

    def wait_for(self, expected: Moved, *but: str, may: Moved) -> None:
        """Until they have moved so, and no other has but what `may` have; a failure's last word may come after its pages are back."""
        seen: list[Moved] = [Counter()]

        def there() -> bool:
            with contextlib.suppress(OSError):
                seen[0] = self.moved(*but)
            return seen[0] - may == expected

        wait_for(there, 10, lambda: f"counters moved: {dict(seen[0])}, expected: {dict(expected)}")


def counts(worker: Worker) -> Moved:
    found: Moved = Counter()
    for (name, labels), value in scrape(worker.address("metrics")).items():
        if name in FAULTY and value:
            said = dict(labels)
            found["", name, f"{said['cause']} ({said['origin']})" if "origin" in said else said.get("cause", "")] += int(value)
    return found


def expected_of(counted: str, state: str) -> Moved:
    """What the failures that docs/failures.md names for a fault ("prefill: client_gone (client); ...") do to the counters."""
    expected: Moved = Counter()
    for part in [] if counted == "nothing" else counted.split("; "):
        service, _, why = part.partition(": ")
        expected[service, "baton_rooms_failed_total", why] += 1
        if state in BY_STATE:
            expected[service, BY_STATE[state], why] += 1
    return expected
