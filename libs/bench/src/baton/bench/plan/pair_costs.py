"""What a pair of servers costs over a plain one: fitted to the points of one prefill and one decode server."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from baton.bench.plan.costs import Costs, Neighbours, PathCosts, Roles
from baton.bench.plan.nonnegative import fit
from baton.bench.plan.points import DecodeGap, FirstToken, Points

#: A neighbour or a role is not believed to make anything faster; what says so is noise.
LEAST_FACTOR = 1.0
#: Bytes a second of a link that was not timed.
ENDLESS = 1e15
#: Prompts that take longer than the bootstrap, of which so many say what computing costs in the prefill role.
MIN_LONGER = 3


def with_pair(costs: Costs, split: Points, max_batched: int) -> Costs:
    """`costs`, a plain server's, with the path, the roles and the neighbours of a pair. max_batched: tokens of a step, of both."""
    idle = [point for point in split.first if not point.boundary_s]
    beside = [point for point in split.first if point.boundary_s]
    computed_s = np.asarray([costs.first_token_s(point.tokens, max_batched) - costs.request_s for point in idle])
    seconds = np.asarray([point.seconds for point in idle])
    said = [point.bootstrap_s for point in idle if point.bootstrap_s is not None]
    # An idle prefill server begins before it knows decode's pages: only prompts that take longer than the bootstrap say what computing costs there.
    longer = computed_s > (float(np.median(said)) if said else 0.0)
    told = longer if longer.sum() >= MIN_LONGER else np.ones(len(idle), dtype=bool)
    constant_s, prefill = map(float, fit(np.column_stack((np.ones(told.sum()), computed_s[told])), seconds[told]))
    bootstrap_s = float(np.median(said)) if said else max(0.0, constant_s - costs.request_s)
    late_s = seconds - costs.request_s - np.maximum(bootstrap_s, max(LEAST_FACTOR, prefill) * computed_s)
    request_s = max(0.0, float(np.median(late_s)))
    alone = [gap for gap in split.decode if not gap.beside_prefill]
    decode = _ratio(alone, costs, 1.0) if alone else LEAST_FACTOR
    roles = Roles(max(LEAST_FACTOR, prefill), max(LEAST_FACTOR, decode))
    slowed_decode = _ratio([gap for gap in split.decode if gap.beside_prefill], costs, roles.decode)
    path = _path(split, bootstrap_s, request_s)
    slowed_prefill = _prefill_slowdown(beside, replace(costs, path=path), roles, max_batched) if beside else LEAST_FACTOR
    neighbours = Neighbours(max(LEAST_FACTOR, slowed_prefill), max(LEAST_FACTOR, slowed_decode))
    return Costs(costs.steps, costs.request_s, path, roles, neighbours)


def _prefill_slowdown(beside: Sequence[FirstToken], costs: Costs, roles: Roles, max_batched: int) -> float:
    """Of all their time together, so that long prompts count. An idle prefill server begins at once, and the first token waits for decode, which
    reserves pages when its step ends, only where the prompt is computed sooner than that: those say nothing."""
    assert costs.path is not None
    own_s = [(point, roles.prefill * (costs.first_token_s(point.tokens, max_batched) - costs.request_s)) for point in beside]
    outside_s, bootstrap_s = costs.outside_s(is_split=True), costs.path.bootstrap_s
    told = [(point.seconds - outside_s, own) for point, own in own_s if own > point.boundary_s + bootstrap_s]
    return sum(seconds for seconds, _ in told) / sum(own for _, own in told) if told else LEAST_FACTOR


def _ratio(gaps: Sequence[DecodeGap], costs: Costs, factor: float) -> float:
    """Median of measured over fitted."""
    if not gaps:
        return LEAST_FACTOR
    return float(np.median([gap.seconds / (factor * costs.steps.decode_s(gap.rows, gap.context)) for gap in gaps]))


def _path(split: Points, bootstrap_s: float, request_s: float) -> PathCosts:
    """Exposed time is that of the handing over and of the bytes of the last layer; bytes over the time of writing are the link's speed."""
    transfers = [transfer for transfer in split.transfers if transfer.exposed_s > 0]
    per_token = sum(transfer.num_bytes for transfer in split.transfers) / max(1, sum(transfer.tokens for transfer in split.transfers))
    if not transfers:
        return PathCosts(per_token, ENDLESS, 0.0, 0.0, bootstrap_s, request_s)
    columns = np.asarray([[1.0, transfer.num_bytes] for transfer in transfers])
    handoff_s, per_byte_s = map(float, fit(columns, np.asarray([transfer.exposed_s for transfer in transfers])))
    timed = [(transfer.num_bytes, transfer.busy_s) for transfer in transfers if transfer.busy_s]
    bandwidth = sum(num for num, _ in timed) / sum(busy for _, busy in timed) if timed else ENDLESS
    return PathCosts(per_token, bandwidth, min(1.0, per_byte_s * bandwidth), handoff_s, bootstrap_s, request_s)


def pair_first_s(costs: Costs, tokens: int, max_batched: int) -> float:
    assert costs.path is not None
    own_s = costs.roles.prefill * (costs.first_token_s(tokens, max_batched) - costs.request_s)
    return costs.outside_s(is_split=True) + max(costs.path.bootstrap_s, own_s)  # an idle prefill server does not wait for the one to begin the other
