"""What a server's prefix cache is likely to hold, where the server does not say: the blocks of the prompts that were sent there. Pure, bounded.

An approximation: such servers evict as they like and nobody is asked. A wrong guess costs a less lucky route and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Of one server, whatever its pool holds: about 8 MB of hashes.
MAX_BLOCKS = 65_536


class PrefixIndex:
    """By server instance: the blocks (`baton.wire.prefix`) that it was sent, least recently used first.

    A block's hash covers everything before it, so a block is only found behind the blocks that it followed. Of one prompt the longest prefix
    is the first to be forgotten: what is held is always held from the prompt's beginning, and a search may halve.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        """max_blocks: the bound for one server."""
        self._max_blocks = max_blocks
        self._servers: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        """Blocks of all servers."""
        return sum(map(len, self._servers.values()))

    def held(self, instance_id: str, blocks: Sequence[int]) -> int:
        """How many leading ones of `blocks` the server was sent before and may still hold."""
        known = self._servers.get(instance_id)
        if not known:
            return 0
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in known:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, instance_id: str, blocks: Sequence[int], *, max_blocks: int) -> None:
        """The server is sent a prompt of `blocks`. max_blocks: how many its own pool holds."""
        known = self._servers.setdefault(instance_id, {})
        for block in reversed(blocks):  # the prompt's beginning becomes the youngest
            known.pop(block, None)
            known[block] = None
        for _ in range(len(known) - min(max_blocks, self._max_blocks)):
            del known[next(iter(known))]

    def forget(self, instance_id: str) -> None:
        self._servers.pop(instance_id, None)
