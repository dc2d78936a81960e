"""Which layers of a room were written when: what the transfer library says of each post, in few parts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.types import TransferPart

#: Of one room and queue, about: what is told of every room is to cost next to nothing.
MAX_PARTS = 16


def parts_of(queue: int, layers: Sequence[int], posts: npt.NDArray[np.int64], first_ns: int) -> list[TransferPart]:
    """layers: of each post, in order. posts: as WriteHandle.parts has them; fewer rows than posts where its last one stands for all that follow.

    first_ns: time.monotonic_ns() of the room's first put. A part is some neighbouring layers of one chunk of the prompt, or, of a prompt with more
    chunks than there are to be parts, all layers of some chunks.
    """
    if not len(posts):
        return []
    starts = [start for start in _starts(layers) if start < len(posts)]
    begins = (np.minimum.reduceat(posts[:, 0], starts) - first_ns) / 1e9
    durations = (np.maximum.reduceat(posts[:, 1], starts) - first_ns) / 1e9 - begins
    times = zip(begins.tolist(), durations.tolist(), np.add.reduceat(posts[:, 2], starts).tolist(), strict=True)
    parts = []
    for start, stop, (begin_s, duration_s, num_bytes) in zip(starts, [*starts[1:], len(layers)], times, strict=True):
        first, last = layers[start], layers[stop - 1]
        if last - first != stop - start - 1:  # several chunks
            first, last = min(layers[start:stop]), max(layers[start:stop])
        parts.append(TransferPart(queue, first, last - first + 1, begin_s, duration_s, num_bytes))
    return parts


def _starts(layers: Sequence[int]) -> list[int]:
    """Where each part begins: at a chunk, which is where the layers begin anew, and within it after so many layers."""
    chunks = [0, *(index for index in range(1, len(layers)) if layers[index] <= layers[index - 1])]
    if len(chunks) > MAX_PARTS:
        return chunks[:: -(-len(chunks) // MAX_PARTS)]
    length = -(-len(layers) // len(chunks))
    step = -(-length // (MAX_PARTS // len(chunks)))
    stops = [*chunks[1:], len(layers)]
    return [start for chunk, stop in zip(chunks, stops, strict=True) for start in range(chunk, stop, step)]
