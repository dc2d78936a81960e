"""What the engine's prefix cache holds, as gateways are told of it: block by block, under hashes with each gateway's own key.

The engine's thread writes down what changes; hashes are made on the event loop, for gateways that ask for them, and nothing at all is done until one
does. What can gather is bounded: a gateway that is too far behind is told everything anew.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.prefix_tree import PrefixWatcher
from baton.wire.prefix import block_id, first_digest, little_endian, next_digest
from baton.wire.v1 import worker_pb2
from baton.workerkit.errors import HostStoppedError

#: Changes that are kept for gateways that have not been told of them: 2 MB or so.
MAX_CHANGES = 16_384
#: Blocks in one report: hashing them takes a millisecond or two of the event loop.
MAX_BLOCKS_A_REPORT = 1_024


@dataclass(frozen=True, slots=True)
class Block:
    """A page of the cache. before: the page that it goes on behind; None: it is the first under `salt`. tokens: little-endian uint32."""

    before: int | None
    salt: bytes
    tokens: bytes


class PrefixLedger:
    """Written by the engine's thread, read by the event loop's tellers."""

    def __init__(self, watch: Callable[[PrefixWatcher], None] | None) -> None:
        """watch: has the engine tell its watcher from now on; called once, when somebody wants to know. None: the prefix cache is off."""
        self._watch = watch
        self._lock = threading.Lock()
        self._watching = False
        #: By page, each behind the page that it goes on behind.
        self._blocks: dict[int, Block] = {}
        self._changes: list[tuple[int, Block | None]] = []
        self._num_forgotten = 0

    @property
    def is_off(self) -> bool:
        return self._watch is None

    @property
    def num_changes(self) -> int:
        """So many have been written down, forgotten ones included."""
        with self._lock:
            return self._num_forgotten + len(self._changes)

    def teller(self, key: bytes) -> PrefixTeller:
        """For one gateway, which has drawn `key`."""
        if self._watch is not None and not self._watching:
            self._watching = True
            with contextlib.suppress(HostStoppedError):  # then there is nothing to tell, and soon nobody to tell it
                self._watch(self)
        return PrefixTeller(self, key)

    def stored(self, page: int, before: int | None, salt: bytes, tokens: bytes) -> None:
        block = Block(before, salt, little_endian(tokens))
        with self._lock:
            self._blocks[page] = block
            self._note(page, block)

    def gone(self, page: int) -> None:
        with self._lock:
            del self._blocks[page]
            self._note(page, None)

    def _note(self, page: int, block: Block | None) -> None:
        self._changes.append((page, block))
        if len(self._changes) >= 2 * MAX_CHANGES:
            del self._changes[:MAX_CHANGES]
            self._num_forgotten += MAX_CHANGES

    def since(self, number: int, most: int) -> list[tuple[int, Block | None]] | None:
        """At most so many changes from number `number` on; None: it is forgotten."""
        with self._lock:
            begin = number - self._num_forgotten
            return self._changes[begin : begin + most] if begin >= 0 else None

    def everything(self) -> tuple[list[tuple[int, Block | None]], int]:
        """All blocks, and the number of the first change behind them."""
        with self._lock:
            return list(self._blocks.items()), self._num_forgotten + len(self._changes)


class PrefixTeller:
    """One gateway's: what it has been told, and what is to be told next. On the event loop."""

    def __init__(self, ledger: PrefixLedger, key: bytes) -> None:
        self._ledger = ledger
        self._key = key
        self._digests: dict[int, bytes] = {}
        self._anew = True
        #: Of a whole list that is being told, what is left, the last one first.
        self._rest: list[tuple[int, Block | None]] = []
        self._next = 0
        #: More is to be told than was.
        self.has_more = False

    def take(self) -> worker_pb2.PrefixBlocks | None:
        """What is to be told now; None: nothing is new."""
        told = worker_pb2.PrefixBlocks(off=self._ledger.is_off)
        changes = self._changes(told)
        if not changes and not told.reset:
            return None
        said: dict[int, bool] = {}
        for page, block in changes:
            if block is not None:
                said[self._stored(page, block)] = True
            elif (digest := self._digests.pop(page, None)) is not None:
                said[block_id(digest)] = False
        told.stored.extend([one for one, is_held in said.items() if is_held])
        told.evicted.extend([one for one, is_held in said.items() if not is_held])
        return told

    def _changes(self, told: worker_pb2.PrefixBlocks) -> list[tuple[int, Block | None]]:
        found = None if self._anew else self._ledger.since(self._next, MAX_BLOCKS_A_REPORT) if not self._rest else []
        if found is None:
            told.reset, self._anew = True, False
            self._digests.clear()
            self._rest, self._next = self._ledger.everything()
            self._rest.reverse()
            found = []
        if self._rest:
            found = self._rest[: -MAX_BLOCKS_A_REPORT - 1 : -1]
            del self._rest[-len(found) :]
        else:
            self._next += len(found)
        self.has_more = bool(self._rest) or self._next < self._ledger.num_changes
        return found

    def _stored(self, page: int, block: Block) -> int:
        before = first_digest(self._key, block.salt) if block.before is None else self._digests[block.before]
        digest = self._digests[page] = next_digest(before, block.tokens)
        return block_id(digest)
