"""From points to costs: non-negative least squares, with residuals told, refused when the formulas do not describe what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.bench.errors import CalibrationError
from baton.bench.plan.calibration import Calibration, Residuals
from baton.bench.plan.costs import Costs, Jitter, StepCosts
from baton.bench.plan.job import ServerLimits
from baton.bench.plan.nonnegative import fit
from baton.bench.plan.pair_costs import pair_first_s, with_pair
from baton.bench.plan.points import DecodeGap, FirstToken, Points

Array = npt.NDArray[np.float64]

#: Half of the points must be nearer to their formula than this, or the formula is not believed.
MOST_MEDIAN_RESIDUAL = 0.25
MIN_POINTS = 8
#: Prompts of at least so many lengths are needed to know what a token and what a square costs.
MIN_LENGTHS = 3
#: Steps of one number of rows that are believed to say how long such a step takes. Each is seen by as many streams as it has rows.
MIN_STEPS_OF_ROWS = 20
NUM_REPLICATES = 12
NUM_QUANTILES = 101


@dataclass(frozen=True)
class Measured:
    """`plain`: points of one plain server; `split`: of one prefill and one decode server, if there was one.

    `words`: (words, prompt tokens) of requests. `limits`: of the plain server; its steps cut prompts into chunks.
    `num_left_out`: repeats that say nothing, because requests failed in them."""

    plain: Points
    split: Points
    words: Sequence[tuple[int, int]]
    limits: ServerLimits
    source: str
    num_left_out: int = 0


def calibrate(measured: Measured, seed: int = 0) -> Calibration:
    """Raises CalibrationError, which says what is missing or does not fit."""
    _require_enough(measured)
    costs = _costs(measured.plain, measured.split, measured.limits.max_batched_tokens)
    residuals, jitter = _residuals(measured, costs)
    for name, found in residuals.items():
        if found.median > MOST_MEDIAN_RESIDUAL:
            raise CalibrationError(
                f"{name}: half of {found.num} points are further than {100 * found.median:.0f} % from the fitted formula, but at most "
                f"{100 * MOST_MEDIAN_RESIDUAL:.0f} % is believed: measure on a machine without other work, or with servers of one kind"
            )
    draw = np.random.default_rng(seed)
    resampled = [(_resampled(measured.plain, draw), _resampled(measured.split, draw)) for _ in range(NUM_REPLICATES)]
    replicates = [_with_jitter(_costs(plain, split, measured.limits.max_batched_tokens), jitter) for plain, split in resampled]
    per_word, template = _words(measured.words)
    return Calibration(
        costs=_with_jitter(costs, jitter),
        replicates=tuple(replicates),
        residuals=residuals,
        tokens_per_word=per_word,
        template_tokens=template,
        source=measured.source,
        notes=tuple(_notes(measured)),
    )


def _require_enough(measured: Measured) -> None:
    plain = measured.plain
    lengths = len({point.tokens for point in plain.first})
    if len(plain.decode) < MIN_POINTS:
        raise CalibrationError(f"{len(plain.decode)} steps of decode rows alone were seen on the plain server, but at least {MIN_POINTS} are needed")
    if len(plain.first) < MIN_POINTS or lengths < MIN_LENGTHS:
        raise CalibrationError(
            f"{len(plain.first)} prompts of {lengths} lengths had the plain server for themselves, but at least {MIN_POINTS} of "
            f"{MIN_LENGTHS} lengths are needed: measure at a lower load too"
        )
    if measured.split.first and not measured.split.transfers:
        raise CalibrationError("the split's samples say nothing of transfers: measure it over Baton's gRPC")


def _costs(plain: Points, split: Points, max_batched: int) -> Costs:
    decode = _decode(plain.decode)
    said = [point.outside_s for point in plain.first if point.outside_s is not None]
    outside_s = float(np.median(said)) if said else None
    columns, seconds = _prefill_rows(plain, decode, max_batched, outside_s)
    request_s, step_s, token_s, square_s, share = map(float, fit(columns, seconds))
    steps = replace(decode, prefill_step_s=step_s, prefill_token_s=token_s, prefill_square_s=square_s, mixed_share=share if plain.mixed else 1.0)
    costs = Costs(steps, request_s if outside_s is None else outside_s)
    return costs if not split.first else with_pair(costs, split, max_batched)


def _decode(gaps: Sequence[DecodeGap]) -> StepCosts:
    """Of decode rows alone: the formula, and how far steps of each number of rows are off it. Numbers that were seen too rarely lie between."""
    columns = np.asarray([[1, gap.rows, gap.context] for gap in gaps], dtype=np.float64)
    step_s, row_s, context_s = map(float, fit(columns, _seconds(gaps)))
    steps = StepCosts(0, 0, 0, step_s, row_s, context_s)
    off: dict[int, list[float]] = {}
    for gap in gaps:
        off.setdefault(gap.rows, []).append(gap.seconds / steps.decode_s(gap.rows, gap.context))
    known = {rows: float(np.median(found)) for rows, found in sorted(off.items()) if len(found) >= MIN_STEPS_OF_ROWS * rows}
    if not known:
        return steps
    every = np.arange(1, max(known) + 1)
    return replace(steps, rows_factor=tuple(np.interp(every, list(known), list(known.values())).tolist()))


def _prefill_rows(plain: Points, decode: StepCosts, max_batched: int, outside_s: float | None) -> tuple[Array, Array]:
    """Columns: of a request, of a step, of a token, of a square, of the decode rows in the same step.

    A prompt that came while rows ran waited for half a step of theirs on average, and had them in its own steps. outside_s: what the servers say of
    a request outside of their steps; the first column is nothing then. Where they say nothing, only prompts of several steps tell a request's share
    from its steps': among prompts of one step, alone and with rows, the constants of request, step and rows make two sums, which leaves one of the
    three open. Without such prompts all of it is the step's: a step reads the whole model, a request's share is small beside that."""
    rows, seconds = [], []
    for point in plain.first:
        if not point.boundary_s:
            rows.append([1.0, _num_chunks(point.tokens, max_batched), point.tokens, float(point.tokens) ** 2, 0.0])
            seconds.append(point.seconds - (outside_s or 0.0))
    for step in plain.mixed:
        rows.append([0.0, 1.0, step.tokens, float(step.tokens) ** 2, decode.decode_s(step.rows, step.context)])
        seconds.append(step.seconds)
    if outside_s is not None or not any(row[1] > 1 for row in rows):
        for row in rows:
            row[0] = 0.0
    return np.asarray(rows, dtype=np.float64), np.asarray(seconds)


def _num_chunks(tokens: int, max_batched: int) -> int:
    return -(-tokens // max_batched)


def _seconds(points: Sequence[DecodeGap] | Sequence[FirstToken]) -> Array:
    return np.asarray([point.seconds for point in points])


def _residuals(measured: Measured, costs: Costs) -> tuple[dict[str, Residuals], Jitter]:
    steps, plain, split = costs.steps, measured.plain, measured.split
    decode = np.asarray([gap.seconds / steps.decode_s(gap.rows, gap.context) for gap in plain.decode])
    first = np.asarray(
        [point.seconds / costs.first_token_s(point.tokens, measured.limits.max_batched_tokens) for point in plain.first if not point.boundary_s]
    )
    found = {"decode step": decode, "first token, idle server": first}
    if plain.mixed:
        fitted = [steps.step_s(step.tokens, step.tokens**2, step.rows, step.context) for step in plain.mixed]
        found["step with a prompt and rows"] = np.asarray([step.seconds for step in plain.mixed]) / np.asarray(fitted)
    if split.first:
        idle = [point for point in split.first if not point.boundary_s]
        found["first token, idle split"] = np.asarray([point.seconds for point in idle]) / np.asarray(
            [pair_first_s(costs, point.tokens, measured.limits.max_batched_tokens) for point in idle]
        )
    quantiles = np.linspace(0, 1, NUM_QUANTILES)
    jitter = Jitter(tuple(np.quantile(first, quantiles).tolist()), tuple(np.quantile(decode, quantiles).tolist()))
    return {name: _residual(ratios) for name, ratios in found.items()}, jitter


def _residual(ratios: Array) -> Residuals:
    off = np.abs(ratios - 1)
    return Residuals(len(ratios), float(np.median(off)), float(np.percentile(off, 90)))


def _with_jitter(costs: Costs, jitter: Jitter) -> Costs:
    return Costs(costs.steps, costs.request_s, costs.path, costs.roles, costs.neighbours, jitter)


def _resampled(points: Points, draw: np.random.Generator) -> Points:
    def again(values: tuple) -> tuple:  # type: ignore[type-arg]
        return tuple(values[pick] for pick in draw.integers(len(values), size=len(values))) if values else ()

    return Points(again(points.decode), again(points.first), again(points.mixed), again(points.transfers))


def _words(words: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """(tokens a word, tokens of every prompt beside them)."""
    if not words:
        return 1.3, 0.0
    columns = np.asarray([[num_words, 1.0] for num_words, _ in words])
    per_word, template = fit(columns, np.asarray([float(tokens) for _, tokens in words]))
    return float(per_word), float(template)


def _notes(measured: Measured) -> list[str]:
    notes = []
    if measured.num_left_out:
        notes.append(f"{measured.num_left_out} repeats in which requests failed were left out")
    if not measured.plain.mixed:
        notes.append("no step with a prompt and decode rows was seen: its rows are taken to cost as much as in a step of their own")
    if not measured.split.first:
        notes.append("no split was measured: only plain servers can be predicted, unless the path is given")
    if measured.split.transfers and not any(transfer.busy_s for transfer in measured.split.transfers):
        notes.append("the split did not say how long it wrote: its link counts as endless but for the exposed part; give the link's bandwidth")
    if not measured.words:
        notes.append("no prompt came with words and tokens: 1.3 tokens a word are assumed")
    return notes
