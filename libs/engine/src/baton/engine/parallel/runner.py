"""Launches every step on all ranks, and takes what rank 0 drew."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engine.errors import RanksDisagreeError
from baton.engine.given_up import GivenUp
from baton.engine.parallel.ranks import Ranks
from baton.engine.runner import Flight, LayerDone, Runner
from baton.engine.scheduling.sequence import Sequence as Tokens
from baton.engine.scheduling.sequence import Slice, StepPlan
from baton.engine.types import Logprobs


@dataclass(frozen=True, slots=True)
class _Layer:
    rank: int
    layer: int
    ready: object | None


class ShardedRunner:
    """A Runner over one runner a rank. make(rank) makes them, each on its rank's thread: captured steps hold collectives.

    All ranks see the same logits and draw the same tokens. A rank that fails, or draws something else, ends the engine with an error: nothing
    can be saved of an engine whose ranks have parted.
    """

    def __init__(self, ranks: Ranks, make: Callable[[int], Runner]) -> None:
        self._ranks = ranks
        self._runners = ranks.run(make)
        self.depth = self._runners[0].depth
        self.warm_lengths = self._runners[0].warm_lengths
        self.launches = self._runners[0].launches

    def launch(self, plan: StepPlan, layer_done: LayerDone | None, given_up: GivenUp | None = None) -> ShardedFlight:
        """Returns when every rank has launched: until then they read the plan's sequences, which only the caller's thread changes.

        layer_done is called on this thread, once all ranks have launched the layer: what it changes no rank reads in the rest of its launch.
        """
        if layer_done is None:
            return ShardedFlight(self._ranks, self._ranks.run(lambda rank: self._runners[rank].launch(plan, None, given_up)))
        layers = _Layers(self._ranks.size, layer_done)

        def launch(rank: int) -> Flight:
            return self._runners[rank].launch(plan, lambda layer, ready: self._ranks.say(_Layer(rank, layer, ready)), given_up)

        return ShardedFlight(self._ranks, self._ranks.run(launch, layers.hear))

    def release(self, sequence: Tokens) -> None:
        """The ranks are idle between launches: their books are kept from here."""
        for runner in self._runners:
            runner.release(sequence)

    def close(self) -> None:
        """Lets go of the ranks' runners, and with them of captured steps. No launch after that."""
        self._runners.clear()


class _Layers:
    """Tells of a layer when all ranks have it: `ready` is then a tuple of their events, in order; None where they have none."""

    def __init__(self, degree: int, layer_done: LayerDone) -> None:
        self._degree = degree
        self._layer_done = layer_done
        self._ready: dict[int, dict[int, object | None]] = {}

    def hear(self, said: _Layer) -> None:
        ready = self._ready.setdefault(said.layer, {})
        ready[said.rank] = said.ready
        if len(ready) == self._degree:
            del self._ready[said.layer]
            events = tuple(ready[rank] for rank in range(self._degree))
            self._layer_done(said.layer, None if events[0] is None else events)


class ShardedFlight:
    """Has run when it has on all ranks: pages that a step frees may then be written by others, on every device."""

    def __init__(self, ranks: Ranks, flights: Sequence[Flight]) -> None:
        self._ranks = ranks
        self._flights = flights

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for rank, flight in enumerate(self._flights):
            try:
                if not flight.wait(max(0.0, deadline - time.monotonic())):
                    return False
            except Exception as error:
                raise self._ranks.fail(rank, error) from error
        return True

    def drawn(self) -> list[int | None]:
        first, *others = (flight.drawn() for flight in self._flights)
        for rank, drawn in enumerate(others, start=1):
            if drawn != first:
                raise self._ranks.fail(rank, RanksDisagreeError(rank, drawn, first))
        return first

    def logprobs(self) -> dict[int, Logprobs]:
        return self._flights[0].logprobs()

    def scored(self) -> list[tuple[Slice, list[Logprobs]]]:
        return self._flights[0].scored()

    def idle_s(self) -> float | None:
        """Of rank 0: all of them wait for one another in every layer."""
        return self._flights[0].idle_s()
