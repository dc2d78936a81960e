"""What a run needs and its user did not say, from a few requests to idle servers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from baton.bench.decide.record import IdlePoint, Targets
from baton.bench.errors import require
from baton.bench.workload import Workload

#: A reader sees a stream as smooth while no gap is this many times the usual one; a first token may take this many times its idle time.
ITL_FACTOR = 3.0
TTFT_FACTOR = 3.0
#: A chunk is a multiple of this many tokens, and never below the second: smaller steps spend their time on reading the weights.
CHUNK_MULTIPLE, CHUNK_MIN, CHUNK_MAX = 8, 16, 8192
#: Part of what the ITL objective leaves beside a step that a chunk may fill. Steps differ (more streams, longer contexts, a machine's moods): one
#: that fills all of it misses the objective every other time, and its server's limit is then a matter of chance.
CHUNK_SHARE = 0.5
#: The search starts where servers that share all work evenly would be busy half of the time.
START_UTILISATION = 0.5
LOOKED_AT = 40


@dataclass(frozen=True)
class Shape:
    """Of a workload's first requests. Words stand for tokens: the generator's words are about one token each."""

    short_words: int
    long_words: int
    mean_words: float
    mean_answer_tokens: float

    @classmethod
    def of(cls, workload: Workload) -> "Shape":
        num = LOOKED_AT if workload.size is None else min(LOOKED_AT, workload.size)
        requests = [workload.request(index) for index in range(num)]
        require(bool(requests), "workload", str(workload.describe()), "one with requests")
        words = [request.num_prompt_words for request in requests]
        short = [request.num_prompt_words for request in requests if not request.is_long] or words
        long = [request.num_prompt_words for request in requests if request.is_long] or [max(words)]
        return cls(round(median(short)), round(median(long)), mean(words), mean(request.max_tokens for request in requests))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Prompt lengths that are worth measuring on idle servers."""
        return tuple(sorted({max(4, self.short_words), max(8, (self.short_words + self.long_words) // 2), max(16, self.long_words)}))


def single(idle: Sequence[IdlePoint]) -> list[IdlePoint]:
    """Of requests that were alone, by length."""
    return sorted((point for point in idle if point.concurrency == 1), key=lambda point: point.prompt_tokens)


def prompt_token_ms(idle: Sequence[IdlePoint]) -> float:
    """What a prompt token costs, from the shortest and the longest prompt."""
    points = single(idle)
    first, last = points[0], points[-1]
    if last.prompt_tokens == first.prompt_tokens:
        return last.ttft_ms / last.prompt_tokens
    return max((last.ttft_ms - first.ttft_ms) / (last.prompt_tokens - first.prompt_tokens), 1e-6)


def targets_of(idle: Sequence[IdlePoint], ttft_ms: float | None, itl_p99_ms: float | None, attainment: float, load_rps: float | None) -> Targets:
    """What was given stands; the rest is a multiple of what an idle server takes for the workload's long prompt and for a step."""
    points = single(idle)
    said = []
    if ttft_ms is None:
        ttft_ms = float(f"{TTFT_FACTOR * points[-1].ttft_ms:.2g}")
        said.append(f"TTFT: {TTFT_FACTOR:g} times that of an idle server for {points[-1].prompt_tokens} tokens ({points[-1].ttft_ms:.0f} ms)")
    if itl_p99_ms is None:
        idle_ms = median(point.itl_ms for point in points)
        itl_p99_ms = float(f"{ITL_FACTOR * idle_ms:.2g}")
        said.append(f"ITL: {ITL_FACTOR:g} times that of an idle server ({idle_ms:.1f} ms)")
    require(ttft_ms > 0, "ttft_ms", ttft_ms, "above 0")
    require(itl_p99_ms > 0, "itl_p99_ms", itl_p99_ms, "above 0")
    require(0 < attainment <= 1, "attainment", attainment, "above 0 and at most 1")
    require(load_rps is None or load_rps > 0, "load", load_rps, "above 0")
    return Targets(ttft_ms, itl_p99_ms, attainment, "; ".join(said) or "given", load_rps)


def chunk_tokens(idle: Sequence[IdlePoint], itl_p99_ms: float) -> int:
    """Most tokens in a step of a plain server such that a step with a chunk of somebody's prompt surely meets the ITL objective: the best that
    chunked prefill can do for the streams. The step is that of the smallest batch that was measured. A chunk so small that the weights are read for
    it alone is not taken."""
    batches = sorted((point for point in idle if point.concurrency > 1), key=lambda point: point.concurrency)
    step_ms = batches[0].itl_ms if batches else median(point.itl_ms for point in single(idle))
    room_ms = CHUNK_SHARE * (itl_p99_ms - step_ms)
    fitting = int(room_ms / prompt_token_ms(idle)) // CHUNK_MULTIPLE * CHUNK_MULTIPLE
    return max(CHUNK_MIN, min(CHUNK_MAX, fitting))


def start_rps(idle: Sequence[IdlePoint], shape: Shape, num_devices: int) -> float:
    """Where the search for each topology's limit begins, two digits."""
    steps = [point for point in idle if point.concurrency > 1] or single(idle)
    widest = max(steps, key=lambda point: point.concurrency)
    request_ms = shape.mean_words * prompt_token_ms(idle) + shape.mean_answer_tokens * widest.itl_ms / widest.concurrency
    return float(f"{START_UTILISATION * num_devices * 1000 / request_ms:.2g}")
