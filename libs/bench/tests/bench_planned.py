"""Costs, loads and measured-looking runs for the tests of `baton.bench.plan`."""

import numpy as np

from baton.bench.plan import Costs, FleetShape, OpenLoad, PathCosts, StepCosts, simulate
from baton.bench.plan.costs import Jitter, Neighbours, Roles
from baton.bench.plan.load import Load
from baton.bench.runfile import Run, RunHeader
from baton.bench.sample import Sample

GPU = Costs(
    StepCosts(0.004, 2.6e-5, 1e-10, 0.005, 5e-5, 1.2e-8, mixed_share=0.3),
    request_s=0.002,
    path=PathCosts(147_456, 40e9, 1 / 36, 0.0005, 0.002),
    jitter=Jitter((0.95, 1.0, 1.1), (0.95, 1.0, 1.02, 1.2)),
)
CPU = Costs(
    StepCosts(0.02, 2.0e-3, 1e-7, 0.045, 5e-3, 1.2e-6, mixed_share=0.4),
    request_s=0.004,
    path=PathCosts(46_080, 2e9, 1 / 30, 0.0015, 0.003, request_s=0.01),
    roles=Roles(1.1, 1.05),
    neighbours=Neighbours(1.2, 1.3),
    jitter=Jitter((0.97, 1.0, 1.03), (0.97, 1.0, 1.03)),
)
HEADER = RunHeader("made", "simulated", "m", {"workload": "made"}, "made", 1, 0, 1, "s", "t", "m")


def poisson(rate_rps: float, lengths: list[tuple[int, int]], seed: int = 0) -> OpenLoad:
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate_rps, len(lengths)))
    return OpenLoad(tuple((float(at), prompt, answer, False) for at, (prompt, answer) in zip(times, lengths, strict=True)))


def chat(num: int, seed: int = 0) -> list[tuple[int, int]]:
    draw = np.random.default_rng(seed)
    return [(3000 if number % 10 == 0 else int(draw.integers(50, 300)), int(draw.integers(60, 200))) for number in range(num)]


def run_of(costs: Costs, shape: FleetShape, load: Load, seed: int = 3, *, tells_start: bool = False) -> Run:
    """What a generator would have written, had these been the servers. tells_start: they say when they began to compute."""
    samples, path = [], costs.path
    for job in simulate(costs, shape, load, seed).jobs:
        times = [job.first_s, *(job.first_s + np.cumsum(job.gaps_s())).tolist()]
        server = {}
        if tells_start:
            server = {"prefill_started_ms": 1e3 * (job.started_s - job.arrived_s), "server_ttft_ms": 1e3 * (job.first_s - job.arrived_s)}
        if shape.is_split and path is not None:
            num_bytes = job.prompt * path.kv_bytes_per_token
            server["state_bootstrapping_ms"] = 1e3 * (job.bootstrapped_s - job.reserved_s)
            exposed_s = path.handoff_s + path.tail_share * num_bytes / path.bandwidth
            server |= {"kv_bytes": num_bytes, "transfer_exposed_ms": 1e3 * exposed_s, "transfer_busy_ms": 1e3 * num_bytes / path.bandwidth}
        samples.append(
            Sample(
                repeat=0,
                index=job.index,
                kind="made",
                is_long=job.is_long,
                is_warm_up=False,
                prompt_words=job.prompt,
                max_tokens=job.answer,
                scheduled_s=job.arrived_s,
                sent_s=job.arrived_s,
                ended_s=times[-1],
                token_s=tuple(times),
                token_counts=(1,) * len(times),
                prompt_tokens=job.prompt,
                output_tokens=job.answer,
                server=server,
            )
        )
    return Run(HEADER, tuple(samples), ())
