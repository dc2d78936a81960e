"""What each server's prefix cache is likely to hold: hashes of page-aligned blocks of the prompts that were sent there. Pure, bounded.

An approximation: servers evict as they like and nobody is asked. A wrong guess costs a less lucky route and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

#: Of one server, whatever its pool holds: about 8 MB of hashes.
MAX_BLOCKS = 65_536
#: Of one prompt: what is behind them does not count, and no request holds the event loop for more than about a millisecond.
MAX_PROMPT_BLOCKS = 1_024


class PrefixIndex:
    """By server instance: the hashes of the prefixes that it was sent, least recently used first.

    A prefix's hash covers everything before it, so a block is only found behind the blocks that it followed. Of one prompt the longest prefix
    is the first to be forgotten: what is held is always held from the prompt's beginning, and a search may halve.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        """max_blocks: the bound for one server."""
        self._max_blocks = max_blocks
        self._servers: dict[str, dict[int, None]] = {}
        self._last: tuple[Sequence[int], int, list[int]] | None = None

    def __len__(self) -> int:
        """Blocks of all servers."""
        return sum(map(len, self._servers.values()))

    def held(self, instance_id: str, prompt: Sequence[int], block_size: int) -> int:
        """Leading tokens of `prompt` that the server was sent before and may still hold; whole blocks of `block_size` tokens."""
        known = self._servers.get(instance_id)
        if not known or block_size < 1:
            return 0
        hashes = self._hashes(prompt, block_size)
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low * block_size

    def add(self, instance_id: str, prompt: Sequence[int], block_size: int, *, max_blocks: int) -> None:
        """The server is sent `prompt`. max_blocks: how many blocks its own pool holds."""
        if block_size < 1:
            return
        known = self._servers.setdefault(instance_id, {})
        for block in reversed(self._hashes(prompt, block_size)):  # the prompt's beginning becomes the youngest
            known.pop(block, None)
            known[block] = None
        for _ in range(len(known) - min(max_blocks, self._max_blocks)):
            del known[next(iter(known))]

    def forget(self, instance_id: str) -> None:
        self._servers.pop(instance_id, None)

    def _hashes(self, prompt: Sequence[int], block_size: int) -> list[int]:
        """Hash of each prefix of whole blocks. Those of the last prompt are kept: all servers are asked about the same one.

        Python's own hash of bytes: keyed anew in each process, so that nobody can make prompts that collide, and fast.
        """
        if self._last is not None and self._last[0] is prompt and self._last[1] == block_size:
            return self._last[2]
        num_blocks = min(len(prompt) // block_size, MAX_PROMPT_BLOCKS)
        data = array("Q", prompt[: num_blocks * block_size]).tobytes()
        block_bytes = 8 * block_size
        running, hashes = 0, []
        for start in range(0, len(data), block_bytes):
            running = hash((running, data[start : start + block_bytes]))
            hashes.append(running)
        self._last = (prompt, block_size, hashes)
        return hashes
