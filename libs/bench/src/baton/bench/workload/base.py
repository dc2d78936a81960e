"""What every workload is: an endless or a finite list of requests, each a pure function of the workload's fields and its index."""

from typing import Protocol

from baton.bench.request import Request

Description = dict[str, str | int | float]

#: Prompts of at least so many words count as long, where the workload does not say itself which ones are.
LONG_WORDS = 1000


class Workload(Protocol):
    """Immutable. `request` raises SettingError for an index past the end of a finite workload."""

    @property
    def size(self) -> int | None:
        """The number of requests; None is without end."""

    def request(self, index: int) -> Request: ...

    def describe(self) -> Description:
        """Everything that decides the requests: two workloads with equal descriptions ask for the same."""
