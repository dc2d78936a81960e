"""What one server says that its prefix cache holds, and what it is about to hold because a prompt is on its way there. Pure, bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from baton.wire.v1 import worker_pb2

#: Of one server: about 20 MB of hashes. What is told beyond is not believed, so that a longer prefix than is known may be there.
MAX_HELD_BLOCKS = 262_144


class HeldBlocks:
    """Of one session with one process: a new one knows nothing.

    Told blocks come behind those before them and go before them (worker.proto, PrefixBlocks), so that a search may halve.
    """

    def __init__(self, max_blocks: int = MAX_HELD_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._told: set[int] = set()
        self._expected: Counter[int] = Counter()
        # Expectations of rooms that are not over, of blocks that were evicted since.
        self._void: Counter[int] = Counter()
        self._is_off = False
        #: The server tells what it holds; else others may guess.
        self.tells = False

    def __len__(self) -> int:
        """Blocks that were told."""
        return len(self._told)

    def take(self, told: worker_pb2.PrefixBlocks) -> None:
        """A report's part. What was evicted is expected by nobody any more either: who comes next computes it again."""
        if told.reset:
            self._told.clear()
            self.tells = True
        self._is_off = told.off
        self._told.difference_update(told.evicted)
        for block in told.evicted:
            if count := self._expected.pop(block, 0):
                self._void[block] += count
        self._told.update(told.stored[: max(0, self._max_blocks - len(self._told))])

    def expect(self, blocks: Sequence[int]) -> None:
        """A prompt of these goes there now; until `done` with the same ones."""
        if not self._is_off:
            self._expected.update(blocks)

    def done(self, blocks: Sequence[int]) -> None:
        """The room is over: from now on only what was told counts."""
        for block in blocks:
            counts = self._void if block in self._void else self._expected
            if counts[block] > 1:
                counts[block] -= 1
            else:
                del counts[block]

    def held(self, blocks: Sequence[int]) -> int:
        """How many leading ones of `blocks` are there, or are to be."""
        return _leading(blocks, lambda block: block in self._told or block in self._expected)

    def told(self, blocks: Sequence[int]) -> int:
        """How many leading ones of `blocks` are there, as the server says."""
        return _leading(blocks, self._told.__contains__)


def _leading(blocks: Sequence[int], is_there: Callable[[int], bool]) -> int:
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if is_there(blocks[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low
