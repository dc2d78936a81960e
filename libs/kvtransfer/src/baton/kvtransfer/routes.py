"""Which ranks write which KV heads where, when a prompt's pages move between servers of equal or unequal tensor-parallel degrees. Pure.

A rank of a server has the pages of all tokens with an equal share of the KV heads: [page][token][head][dim]. Where two ranks share all their
heads, whole runs of pages move, as between servers of one rank each. Where they share some of them, each token's slice moves by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from baton.kvtransfer.errors import InvalidArgument
from baton.kvtransfer.spans import PageArray, PoolLayout, SpanArray, page_pairs, spans_for


class RankLayout(PoolLayout, Protocol):
    """The pool of one rank."""

    @property
    def page_size(self) -> int: ...

    @property
    def num_kv_heads(self) -> int:
        """Of this rank."""


@dataclass(frozen=True, slots=True)
class Route:
    """`num_heads` KV heads that one source rank has and one destination rank wants: where they begin among each of the two's own heads."""

    source_rank: int
    destination_rank: int
    num_heads: int
    source_head: int
    destination_head: int


def routes(num_kv_heads: int, source_degree: int, destination_degree: int) -> tuple[Route, ...]:
    """All routes between two servers of a model with `num_kv_heads`, by destination rank and then by source rank: both sides number them so.

    Together they cover every head of every destination rank once. Raises InvalidArgument for a degree that does not divide the heads.
    """
    for name, degree in (("source_degree", source_degree), ("destination_degree", destination_degree)):
        if num_kv_heads < 1 or degree < 1 or num_kv_heads % degree:
            raise InvalidArgument(f"{name}={degree} must divide the model's {num_kv_heads} KV heads")
    here, there = num_kv_heads // source_degree, num_kv_heads // destination_degree
    found = []
    for destination in range(destination_degree):
        first, end = destination * there, (destination + 1) * there
        for source in range(first // here, -(-end // here)):
            begin, stop = max(first, source * here), min(end, (source + 1) * here)
            found.append(Route(source, destination, stop - begin, begin - source * here, begin - first))
    return tuple(found)


def routes_into(every: Sequence[Route], destination_rank: int) -> list[int]:
    """The numbers of the routes that end at one rank."""
    return [number for number, route in enumerate(every) if route.destination_rank == destination_rank]


def own_heads(first: int, count: int, layout: RankLayout) -> tuple[int, int] | None:
    """(first, count) of a rank's heads; None where that is all of them."""
    return None if (first, count) == (0, layout.num_kv_heads) else (first, count)


def route_spans(
    route: Route,
    source: RankLayout,
    destination: RankLayout,
    layer: int,
    source_pages: Sequence[int] | PageArray,
    destination_pages: Sequence[int] | PageArray,
    first: int = 0,
    count: int | None = None,
) -> SpanArray:
    """As `spans_for`, of the route's heads only: one span for each run of pages where both ranks have the same heads, else one for each token."""
    if route.num_heads == source.num_kv_heads == destination.num_kv_heads:
        return spans_for(source, destination, layer, source_pages, destination_pages, first, count)
    head_bytes = _head_bytes(source)
    if source.page_size != destination.page_size or head_bytes != _head_bytes(destination):
        here, there = (f"{layout.page_size} tokens of {_head_bytes(layout)} bytes a head" for layout in (source, destination))
        raise InvalidArgument(f"pages differ: {here} here, {there} at the destination")
    from_pages, to_pages = page_pairs(source_pages, destination_pages, first, count)
    tokens = np.arange(source.page_size, dtype=np.int64)
    num_tokens = len(from_pages) * source.page_size
    rows = np.empty((2 * num_tokens, 3), dtype=np.int64)
    for plane, block in ((2 * layer, rows[:num_tokens]), (2 * layer + 1, rows[num_tokens:])):
        for column, (layout, pages, head) in enumerate(((source, from_pages, route.source_head), (destination, to_pages, route.destination_head))):
            slots = (pages[:, None] * layout.page_size + tokens).reshape(-1)
            block[:, column] = plane * layout.plane_bytes + slots * (layout.num_kv_heads * head_bytes) + head * head_bytes
        block[:, 2] = route.num_heads * head_bytes
    return rows


def _head_bytes(layout: RankLayout) -> int:
    """Of one token."""
    return layout.page_bytes // (layout.page_size * layout.num_kv_heads)
