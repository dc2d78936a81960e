"""What is asked of a simulated fleet: when, how long the prompts, how long the answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.bench.arrivals import ArrivalOptions, ClosedLoop, build_arrivals
from baton.bench.errors import require
from baton.bench.plan.job import Job
from baton.bench.sample import Sample
from baton.bench.workload import Workload

#: Requests of a workload whose lengths stand for all of it.
NUM_LENGTHS = 2000


@dataclass(frozen=True)
class Lengths:
    """(prompt tokens, answer tokens, is long) of requests, in their order."""

    rows: tuple[tuple[int, int, bool], ...]

    def __post_init__(self) -> None:
        require(bool(self.rows), "lengths", 0, "at least one request")
        require(all(prompt >= 1 and answer >= 1 for prompt, answer, _ in self.rows), "lengths", "a length below 1", "at least one token each")

    @classmethod
    def of_workload(cls, workload: Workload, tokens_per_word: float, template_tokens: float = 0.0, num_requests: int = NUM_LENGTHS) -> "Lengths":
        """Prompts are words in a workload; a calibration knows how many tokens they are."""
        size = num_requests if workload.size is None else min(num_requests, workload.size)
        requests = [workload.request(index) for index in range(size)]
        return cls(
            tuple(
                (max(1, round(tokens_per_word * request.num_prompt_words + template_tokens)), max(1, request.max_tokens), request.is_long)
                for request in requests
            )
        )


@dataclass(frozen=True)
class OpenLoad:
    """Jobs that arrive when they do."""

    arrivals: tuple[tuple[float, int, int, bool], ...]
    num_clients: int = field(default=0, init=False)

    def jobs(self) -> list[Job]:
        return [Job(index, *row) for index, row in enumerate(self.arrivals)]


@dataclass(frozen=True)
class ClosedLoad:
    """Every client sends its next one when it has its answer."""

    rows: tuple[tuple[int, int, bool], ...]
    num_clients: int

    def jobs(self) -> list[Job]:
        return [Job(index, 0.0, *row) for index, row in enumerate(self.rows)]


Load = OpenLoad | ClosedLoad


def drawn(lengths: Lengths, arrivals: ArrivalOptions, num_requests: int, seed: int) -> Load:
    """`num_requests` whose lengths are drawn anew from `lengths`, and whose arrivals take this seed too."""
    draw = np.random.default_rng([seed, arrivals.seed])
    rows = [lengths.rows[pick] for pick in draw.integers(len(lengths.rows), size=num_requests)]
    if arrivals.name == "closed":
        loop = build_arrivals(arrivals, ())
        assert isinstance(loop, ClosedLoop)
        require(loop.think_s == 0, "think_s", loop.think_s, "0: a simulated client sends at once")
        return ClosedLoad(tuple(rows), loop.num_clients)
    require(arrivals.name in ("poisson", "gamma"), "arrivals", arrivals.name, "one of poisson, gamma, closed")
    options = ArrivalOptions(arrivals.name, arrivals.rate_rps, arrivals.cv, seed=int(draw.integers(2**31)))
    process = build_arrivals(options, ())
    assert not isinstance(process, ClosedLoop)
    return OpenLoad(tuple((float(at), *row) for at, row in zip(process.times_s(num_requests), rows, strict=True)))


def replayed(samples: Sequence[Sample]) -> OpenLoad:
    """The requests of one measured repeat, at the times at which they were sent; those without a number of prompt tokens cannot be replayed."""
    known = [sample for sample in samples if sample.prompt_tokens and sample.num_tokens]
    require(len(known) == len(samples), "samples", f"{len(samples) - len(known)} without token counts", "all answered, with usage")
    ordered = sorted(known, key=lambda sample: sample.sent_s)
    return OpenLoad(tuple((sample.sent_s, sample.prompt_tokens or 1, sample.num_tokens, sample.is_long) for sample in ordered))
