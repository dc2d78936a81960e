"""Spans: what to move, as (source offset, destination offset, bytes) rows. Pure arithmetic on numpy arrays; adjacent pairs are merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.kvtransfer.errors import InvalidArgument

#: An int64 array of shape [n, 3]: source offset, destination offset, bytes; offsets are from the start of each side's region.
SpanArray = npt.NDArray[np.int64]
PageArray = npt.NDArray[np.int64]


class PoolLayout(Protocol):
    """A layer-major pool, [layer][keys|values][page]: the bytes of one page of one layer's keys, and of all of them."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def plane_bytes(self) -> int: ...


def page_ids(extents: Iterable[tuple[int, int]]) -> PageArray:
    """(first, count) runs of pages, in the order of the prompt -> int64 [number of pages]."""
    runs = [np.arange(first, first + count, dtype=np.int64) for first, count in extents]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)


def spans_for(
    source: PoolLayout,
    destination: PoolLayout,
    layer: int,
    source_pages: Sequence[int] | PageArray,
    destination_pages: Sequence[int] | PageArray,
    first: int = 0,
    count: int | None = None,
) -> SpanArray:
    """The spans that copy pages [first, first + count) of a prompt, one layer's keys and values.

    source_pages, destination_pages: page ids in the order of the prompt, entry for entry. The two pools may hold different numbers of pages but
    must have equal page_bytes. Runs that are consecutive on both sides become one span. Returns int64 [n, 3], keys before values.
    """
    if source.page_bytes != destination.page_bytes:
        raise InvalidArgument(f"page_bytes differ: {source.page_bytes} here, {destination.page_bytes} at the destination")
    from_pages, to_pages = page_pairs(source_pages, destination_pages, first, count)
    if len(from_pages) == 0:
        return np.empty((0, 3), dtype=np.int64)
    starts = _run_starts(from_pages, to_pages)
    lengths = np.diff(np.append(starts, len(from_pages)))
    rows = np.empty((2 * len(starts), 3), dtype=np.int64)
    for plane, block in ((2 * layer, rows[: len(starts)]), (2 * layer + 1, rows[len(starts) :])):
        block[:, 0] = plane * source.plane_bytes + from_pages[starts] * source.page_bytes
        block[:, 1] = plane * destination.plane_bytes + to_pages[starts] * destination.page_bytes
        block[:, 2] = lengths * source.page_bytes
    return rows


def page_pairs(
    source_pages: Sequence[int] | PageArray, destination_pages: Sequence[int] | PageArray, first: int, count: int | None
) -> tuple[PageArray, PageArray]:
    """Pages [first, first + count) of a prompt on both sides; count None: all that both know. Raises InvalidArgument where one knows fewer."""
    have = min(len(source_pages), len(destination_pages))
    count = have - first if count is None else count
    if first < 0 or count < 0 or first + count > have:
        raise InvalidArgument(f"pages [{first}, {first + count}) asked for, but only {have} are known on both sides")
    end = first + count
    return np.asarray(source_pages[first:end], dtype=np.int64), np.asarray(destination_pages[first:end], dtype=np.int64)


def _run_starts(from_pages: PageArray, to_pages: PageArray) -> PageArray:
    breaks = (np.diff(from_pages) != 1) | (np.diff(to_pages) != 1)
    return np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.int64)


def merge(spans: SpanArray) -> SpanArray:
    """Joins rows that follow one another on both sides. Order is kept; int64 [n, 3] -> int64 [m, 3], m <= n."""
    if len(spans) < 2:
        return spans
    ends = spans[:-1, :2] + spans[:-1, 2:3]
    starts = np.concatenate(([0], np.flatnonzero((ends != spans[1:, :2]).any(axis=1)) + 1))
    merged = spans[starts].copy()
    merged[:, 2] = np.add.reduceat(spans[:, 2], starts)
    return merged


def as_rows(spans: SpanArray) -> SpanArray:
    """Returns int64 [n, 3], C-contiguous; raises InvalidArgument for another shape, and for numbers that int64 does not hold exactly."""
    try:
        given = np.asarray(spans)
        rows = np.ascontiguousarray(given, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidArgument(f"spans are no array of int64: {error}") from error
    if rows.ndim != 2 or rows.shape[1] != 3:
        raise InvalidArgument(f"spans have shape {rows.shape}, must be [n, 3]: source offset, destination offset, bytes")
    if given.size and (given.dtype.kind not in "iu" or (given.dtype == np.uint64 and (rows < 0).any())):
        raise InvalidArgument(f"spans have dtype {given.dtype}, must be int64 (or integers that fit it)")
    return rows


def check(spans: SpanArray, source_bytes: int, destination_bytes: int) -> SpanArray:
    """As as_rows; raises InvalidArgument that names the first row outside either region too."""
    rows = as_rows(spans)
    source, destination, length = rows[:, 0], rows[:, 1], rows[:, 2]
    bad = (length <= 0) | (source < 0) | (destination < 0) | (length > source_bytes - source) | (length > destination_bytes - destination)
    if bad.any():
        index = int(np.flatnonzero(bad)[0])
        raise InvalidArgument(
            f"spans[{index}] = {rows[index].tolist()} (source offset, destination offset, bytes) is outside the source region of "
            f"{source_bytes} bytes or the destination region of {destination_bytes} bytes"
        )
    return rows
