"""What single steps took, read from the samples of a generator that drove one plain server, or one prefill and one decode server."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.bench.plan.job import ServerLimits
from baton.bench.runfile import Run
from baton.bench.sample import Sample

Array = npt.NDArray[np.float64]
#: A first token so near to a gap's end, or within this part of the gap, was made by the same step.
SAME_STEP_S, SAME_STEP_PART = 0.004, 0.15
#: A request sent so shortly before or after a step's start may have come in time for it or not.
ON_THE_WAY_S = 0.01


@dataclass(frozen=True)
class DecodeGap:
    """A step of decode rows alone, as one stream saw it. `beside_prefill`: while a prompt was computed by another server of the host."""

    rows: int
    context: int
    seconds: float
    beside_prefill: bool = False


@dataclass(frozen=True)
class FirstToken:
    """A prompt that no other prompt competed with. `rows`: of the streams that ran beside it.

    `boundary_s`: from its sending until the step that these were in ended; decode reserves its pages then. `outside_s`: of `seconds`, what lay
    before the server began to compute and behind its answer. `bootstrap_s`: of a split, until its prefill server knew decode's pages. None where the
    servers did not say."""

    tokens: int
    seconds: float
    rows: int = 0
    boundary_s: float = 0.0
    outside_s: float | None = None
    bootstrap_s: float | None = None


@dataclass(frozen=True)
class MixedStep:
    """A step that computed one whole prompt and gave every stream a token."""

    tokens: int
    rows: int
    context: int
    seconds: float


@dataclass(frozen=True)
class Transfer:
    """`exposed_s`: from the end of the last layer until decode saw the doorbell. `busy_s`: with a write under way; None where it was not said."""

    tokens: int
    num_bytes: float
    exposed_s: float
    busy_s: float | None


@dataclass(frozen=True)
class Points:
    decode: tuple[DecodeGap, ...] = ()
    first: tuple[FirstToken, ...] = ()
    mixed: tuple[MixedStep, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    def __add__(self, other: "Points") -> "Points":
        return Points(self.decode + other.decode, self.first + other.first, self.mixed + other.mixed, self.transfers + other.transfers)


def points_of(runs: Iterable[Run], limits: ServerLimits, *, is_split: bool) -> Points:
    """Repeats in which anything failed are left out: what a failed request cost is not known."""
    found = Points()
    for run in runs:
        for samples in run.repeats:
            if all(sample.error is None and sample.prompt_tokens and sample.token_s for sample in samples):
                found += _Repeat(samples, limits, is_split).points()
    return found


class _Repeat:
    """Arrays over the samples of one repeat: when each was in prefill, when it streamed."""

    def __init__(self, samples: Sequence[Sample], limits: ServerLimits, is_split: bool) -> None:
        self._samples, self._limits, self._is_split = samples, limits, is_split
        self._sent = np.asarray([sample.sent_s for sample in samples])
        self._first = np.asarray([sample.token_s[0] for sample in samples])
        self._last = np.asarray([sample.token_s[-1] for sample in samples])
        self._prompt = np.asarray([sample.prompt_tokens or 0 for sample in samples])
        self._tokens = np.sort(np.concatenate([sample.token_s for sample in samples]))
        # A prompt of a split is out of prefill's way when its first token is drawn, and joins the rows some time after.
        self._joined = self._first if not is_split else np.asarray([sample.token_s[min(1, len(sample.token_s) - 1)] for sample in samples])

    def points(self) -> Points:
        decode, mixed = [], []
        for number, sample in enumerate(self._samples):
            for gap in self._gaps(number, sample):
                if isinstance(gap, DecodeGap):
                    decode.append(gap)
                else:
                    mixed.append(gap)
        return Points(tuple(decode), tuple(self._firsts()), tuple(mixed), tuple(self._transfers()))

    def _gaps(self, number: int, sample: Sample) -> Iterator[DecodeGap | MixedStep]:
        times = sample.token_s
        for place in range(1 if self._is_split else 0, len(times) - 1):
            start, end = times[place], times[place + 1]
            if sample.token_counts[place + 1] != 1:
                continue
            rows, context = self._streams(start, end)
            if self._is_split:
                if not self._changes(start, end) and (beside := self._beside(start, end)) is not None:
                    yield DecodeGap(rows, context, end - start, beside)
                continue
            if (np.abs(self._sent - start) < min(ON_THE_WAY_S, (end - start) / 2)).any():
                continue
            # What is sent while a step runs waits for its end.
            prefills = np.flatnonzero((self._sent < start) & (self._first > start))
            if not len(prefills):
                yield DecodeGap(rows, context, end - start)
            elif len(prefills) == 1 and self._was_one_step(prefills[0], end, end - start, rows):
                yield MixedStep(int(self._prompt[prefills[0]]), rows, context, end - start)

    def _beside(self, start: float, end: float) -> bool | None:
        """Whether a prompt was in prefill all the time; None: for a part of it."""
        if ((self._sent <= start) & (self._first >= end)).any():
            return True
        return None if ((self._sent < end) & (self._first > start)).any() else False

    def _was_one_step(self, prompt: int, end: float, gap_s: float, rows: int) -> bool:
        """Whether this step computed the whole prompt: its first token came with the step's end."""
        whole = self._prompt[prompt] <= self._limits.prompt_budget(rows)
        return bool(whole and abs(self._first[prompt] - end) < max(min(SAME_STEP_S, gap_s / 2), SAME_STEP_PART * gap_s))

    def _streams(self, start: float, end: float) -> tuple[int, int]:
        """Rows of the step from `start` to `end`, and the tokens that they attend to."""
        middle = (start + end) / 2
        there: list[int] = np.flatnonzero((self._joined <= middle) & (self._last >= middle)).tolist()
        answered = sum(int(np.searchsorted(self._samples[number].token_s, middle)) for number in there)
        return len(there), int(self._prompt[there].sum()) + answered

    def _changes(self, start: float, end: float) -> bool:
        middle = (start + end) / 2
        within = (end - start) * 0.4
        return bool((np.abs(self._joined - middle) < within).any() or (np.abs(self._last - middle) < within).any())

    def _firsts(self) -> Iterator[FirstToken]:
        for number in range(len(self._samples)):
            sent, first = self._sent[number], self._first[number]
            others = (self._sent < first) & (self._first > sent)
            others[number] = False
            if others.any():
                continue
            if not ((self._first < first) & (self._last > sent)).any():
                yield self._alone(number, float(first - sent))
                continue
            after = self._tokens[np.searchsorted(self._tokens, sent, side="right") :]
            boundary_s = float(after[0] - sent)
            # The neighbour must have been busy all the time.
            if boundary_s >= ON_THE_WAY_S and ((self._joined <= sent) & (self._last >= first)).any():
                yield FirstToken(int(self._prompt[number]), float(first - sent), self._streams(sent, first)[0], boundary_s)

    def _alone(self, number: int, seconds: float) -> FirstToken:
        sample = self._samples[number]
        return FirstToken(int(self._prompt[number]), seconds, outside_s=_outside_s(sample, seconds), bootstrap_s=_bootstrap_s(sample))

    def _transfers(self) -> Iterator[Transfer]:
        for sample in self._samples:
            if "kv_bytes" in sample.server and "transfer_exposed_ms" in sample.server:
                busy_ms = sample.server.get("transfer_busy_ms")
                exposed_s = sample.server["transfer_exposed_ms"] / 1e3
                yield Transfer(sample.prompt_tokens or 0, sample.server["kv_bytes"], exposed_s, busy_ms / 1e3 if busy_ms else None)


def _outside_s(sample: Sample, seconds: float) -> float | None:
    server = sample.server
    if "prefill_started_ms" not in server or "server_ttft_ms" not in server:
        return None
    computed_ms = server["server_ttft_ms"] - server["prefill_started_ms"]
    return max(0.0, seconds - computed_ms / 1e3) if computed_ms > 0 else None


def _bootstrap_s(sample: Sample) -> float | None:
    known_ms = sample.server.get("state_bootstrapping_ms")
    return None if known_ms is None else known_ms / 1e3
