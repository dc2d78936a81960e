"""Plans and predictions as Markdown."""

from collections.abc import Sequence

from baton.bench.plan.calibration import Calibration
from baton.bench.plan.pair_costs import ENDLESS
from baton.bench.plan.predict import Band, Prediction
from baton.bench.plan.sizing import Demand, Sized

#: Figure -> (heading, factor, digits).
COLUMNS = {
    "ttft_p50_ms": ("TTFT p50 ms", 1.0),
    "ttft_p99_ms": ("TTFT p99 ms", 1.0),
    "itl_p50_ms": ("ITL p50 ms", 1.0),
    "itl_p99_ms": ("ITL p99 ms", 1.0),
    "goodput_share": ("good %", 100.0),
    "requests_per_s": ("requests/s", 1.0),
    "busy_share": ("busy %", 100.0),
}


def predictions_markdown(predictions: Sequence[Prediction], calibration: Calibration, demand: str) -> str:
    shown = [name for name in COLUMNS if any(name in found.figures for found in predictions)]
    head = "| servers | " + " | ".join(COLUMNS[name][0] for name in shown) + " |\n|---|" + "---|" * len(shown)
    lines = [f"| {found.shape.name} | " + " | ".join(_cell(found, name) for name in shown) + " |" for found in predictions]
    seeds = {found.num_seeds for found in predictions}
    over = " or ".join(map(str, sorted(seeds)))
    about = f"{demand}. Median (least to most) over {over} seeds, each with costs from another resample of the measured points."
    return "\n\n".join(["# Predicted", about, "\n".join([head, *lines]), calibration_markdown(calibration)]) + "\n"


def sized_markdown(sized: Sequence[Sized], refused: Sequence[str], demand: Demand, calibration: Calibration) -> str:
    wanted = demand.objectives
    about = (
        f"{demand.arrivals.rate_rps:g} requests/s, of which {100 * demand.attainment:g} % shall have a TTFT of at most {wanted.ttft_ms:g} ms and an "
        f"ITL p99 of at most {wanted.itl_p99_ms:g} ms."
    )
    lines = [f"* **{found.kind}**: {_count(found)}" for found in sized] + [f"* {text}" for text in refused]
    parts = ["# How many servers", about, "\n".join(lines)]
    if sized:
        best = min(sized, key=lambda found: found.num_servers)
        parts.append(f"Fewest servers: **{best.confirmed.shape.name}**.{_sureness(sized)}")
    text = "\n\n".join(parts)
    return text + "\n\n" + predictions_markdown([found.confirmed for found in sized], calibration, "The middle of these, whole, under the whole load")


def calibration_markdown(calibration: Calibration) -> str:
    steps, path = calibration.costs.steps, calibration.costs.path
    chunk = f"{_ms(steps.prefill_step_s)} + {_ms(steps.prefill_token_s)} a token + {1e9 * steps.prefill_square_s:.3g} ns a squared token"
    factors = steps.rows_factor
    times = f", times {min(factors):.2f} to {max(factors):.2f} for 1 to {len(factors)} rows" if factors else ""
    context = f"{1e6 * steps.decode_context_s:.3g} us a token of context"
    lines = [
        f"decode step: {_ms(steps.decode_step_s)} + {_ms(steps.decode_row_s)} a row + {context}{times}",
        f"prompt chunk: {chunk}; with rows, {steps.mixed_share:.2f} of what they take alone on top",
        f"of a request beside: {_ms(calibration.costs.request_s)}",
    ]
    if path is not None:
        moving = f"{path.kv_bytes_per_token:,.0f} bytes a token, {100 * path.tail_share:.1f} % of a chunk after its last layer"
        speed = f"{path.bandwidth / 1e9:.3g} GB/s" if path.bandwidth < ENDLESS else "speed not timed"
        lines.append(f"path: {speed}, {moving}, {_ms(path.handoff_s)} to hand over, {_ms(path.bootstrap_s)} to bootstrap")
        if path.request_s > 0:
            lines.append(f"of a request to a pair beside, over that: {_ms(path.request_s)}")
    for name, found in calibration.residuals.items():
        lines.append(f"{name}: {found.num} points, half within {100 * found.median:.1f} %, nine of ten within {100 * found.p90:.1f} %")
    return f"## Calibrated with {calibration.source}\n\n" + "\n".join(f"* {line}" for line in (*lines, *calibration.notes))


def _cell(found: Prediction, name: str) -> str:
    if name not in found.figures:
        return ""
    factor = COLUMNS[name][1]
    band = found.figures[name]
    return f"{_number(factor * band.middle)} ({_number(factor * band.low)} to {_number(factor * band.high)})"


def _count(found: Sized) -> str:
    """The middle fleet's own numbers, so that they add up, and what each kind was between over the seeds."""
    middle = found.confirmed.shape
    if found.kind == "plain":
        return f"{_between(middle.num_plain, found.num_plain)} plain servers"
    prefill, decode = _between(middle.num_prefill, found.num_prefill), _between(middle.num_decode, found.num_decode)
    return f"{prefill} prefill and {decode} decode servers, {found.num_servers:g} in all"


def _sureness(sized: Sequence[Sized]) -> str:
    """Whether the other kind could be the smaller one after all."""
    if len(sized) < 2:
        return ""
    best, other = sorted(sized, key=lambda found: found.num_servers)[:2]
    if best.most_servers >= other.least_servers:
        return f" The {other.kind} fleet is within the error bars: too close to call without measuring."
    return f" The {other.kind} fleet needs {other.num_servers / best.num_servers:.2f} times as many."


def _between(number: int, band: Band) -> str:
    return f"{number}" if band.low == band.high else f"{number} ({band.low:g} to {band.high:g})"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
