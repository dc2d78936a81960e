"""Where a calibration's points come from: run files of the generator, or all that a decide run measured."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton.bench.decide.record import IdlePoint, Topology
from baton.bench.decide.record import load as load_decide
from baton.bench.errors import CalibrationError
from baton.bench.plan.fitting import Measured
from baton.bench.plan.job import ServerLimits
from baton.bench.plan.points import DecodeGap, FirstToken, Points, Transfer, points_of
from baton.bench.runfile import Run, load_run


def from_runs(plain: Sequence[Run], split: Sequence[Run], limits: ServerLimits, source: str) -> Measured:
    """`plain`: against one plain server; `split`: against one prefill and one decode server. Other numbers of servers cannot be told from samples
    and give costs of no server."""
    words = [(sample.prompt_words, sample.prompt_tokens) for run in (*plain, *split) for sample in run.samples if sample.prompt_tokens]
    left_out = sum(any(sample.error is not None for sample in repeat) for run in (*plain, *split) for repeat in run.repeats)
    return Measured(points_of(plain, limits, is_split=False), points_of(split, limits, is_split=True), words, limits, source, left_out)


def from_decide(folder: Path, limits: ServerLimits) -> Measured:
    """Of a decide run: its idle points, and the samples of the topologies `one` and the split of one and one."""
    record = load_decide(folder)
    limits = replace(limits, mixed_prompt_tokens=record.chunk_tokens or limits.mixed_prompt_tokens)
    one = [topology for topology in record.topologies if topology.kind == "one"]
    pairs = [topology for topology in record.topologies if (topology.num_prefill, topology.num_decode) == (1, 1)]
    if not one:
        raise CalibrationError(f"{folder}: the decide run has no topology of one plain server")
    base = folder if folder.is_dir() else folder.parent
    runs = [[load_run(base / cell.samples) for topology in kind for cell in record.cells_of(topology.name)] for kind in (one, pairs)]
    measured = from_runs(runs[0], runs[1], limits, f"decide run {base.name} of {record.created_at}")
    return replace(measured, plain=measured.plain + _idle_points(record.idle, one), split=measured.split + _idle_points(record.idle, pairs))


def _idle_points(idle: Sequence[IdlePoint], topologies: Sequence[Topology]) -> Points:
    """Each is a median of several requests and stands as often as it has them."""
    names = {topology.name for topology in topologies}
    decode, first, transfers = [], [], []
    for point in idle:
        if point.topology not in names:
            continue
        seconds = point.itl_ms / 1e3
        decode += [DecodeGap(point.concurrency, point.concurrency * point.prompt_tokens, seconds)] * point.num
        if point.concurrency == 1:
            first += [FirstToken(point.prompt_tokens, point.ttft_ms / 1e3)] * point.num
            if point.kv_bytes is not None and point.exposed_ms is not None:
                transfers += [Transfer(point.prompt_tokens, point.kv_bytes, point.exposed_ms / 1e3, None)] * point.num
    return Points(tuple(decode), tuple(first), (), tuple(transfers))
