"""What a decode step needs of each running sequence, kept on the device from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List

import torch
from torch import Tensor

from baton.engine.device.extras import Extra
from baton.engine.device.upload import upload
from baton.engine.page_table import PageTable
from baton.engine.scheduling.sequence import Sequence
from baton.engine.types import MAX_STOP_TOKENS

#: Rows of `wide`, of `small` and of `real`: the order that `baton.kernels.seat_rows` reads.
TOKEN, POSITION, SEED, FREE_FROM = range(4)
TOP_K = 0
TEMPERATURE, TOP_P, MIN_P = range(3)
MAX_INT32 = (1 << 31) - 1


class Seats:
    """`num_seats` places for sequences and one more, number `num_seats`, for the padding of a batch: nothing is ever read from it or kept in it.

    wide [4, seats] int64: the token that is computed next (drawn by the last step, perhaps not yet known to the host), its position, the seed,
    and the position from which stop tokens may be drawn. small [1 + MAX_STOP_TOKENS, seats] int32: top_k and the stop tokens (-1: none).
    real [3, seats] float32: temperature, top_p, min_p. table [seats, pages] int32: the sequence's pages.
    """

    def __init__(self, num_seats: int, max_pages: int, device: torch.device) -> None:
        self.num_seats = num_seats
        self._device = device
        self.wide = torch.zeros(4, num_seats + 1, dtype=torch.int64, device=device)
        self.small = torch.full((1 + MAX_STOP_TOKENS, num_seats + 1), -1, dtype=torch.int32, device=device)
        self.real = torch.zeros(3, num_seats + 1, dtype=torch.float32, device=device)
        self.table = torch.zeros(num_seats + 1, max_pages, dtype=torch.int32, device=device)
        self._places = self.table.view(-1)
        self._free = list(range(num_seats))[::-1]
        #: Changes whenever somebody takes a seat or gives one back.
        self.version = 0
        self._taken: dict[Sequence, int] = {}
        self._num_pages: dict[Sequence, int] = {}
        self._extras: dict[Sequence, Extra] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._taken

    def __len__(self) -> int:
        return len(self._taken)

    def of(self, sequence: Sequence) -> int:
        return self._taken[sequence]

    def extra(self, sequence: Sequence) -> Extra | None:
        """None where the logits are drawn from as they are."""
        return self._extras.get(sequence)

    def release(self, sequence: Sequence) -> None:
        """Gives the seat back, if there is one. Steps that were launched with it keep to the old values: the next owner's come after them."""
        seat = self._taken.pop(sequence, None)
        if seat is not None:
            self.version += 1
            del self._num_pages[sequence]
            self._extras.pop(sequence, None)
            self._free.append(seat)

    def take(self, newcomers: List[tuple[Sequence, int]]) -> None:
        """Seats sequences; the number is the position of the token that they compute next. A token that the host does not know yet is put
        there by `set_tokens`."""
        self.version += 1
        seats = []
        wide, small, real = [], [], []
        for sequence, position in newcomers:
            seat = self._vacant()
            self._taken[sequence] = seat
            self._num_pages[sequence] = 0
            seats.append(seat)
            sampling = sequence.request.sampling
            if sampling.adjusts:
                self._extras[sequence] = Extra(sequence, self._device)
            known = sequence.tokens[position] if position < len(sequence.tokens) else 0
            wide.append([known, position, signed(sampling.seed), sequence.num_prompt + sampling.min_tokens])
            small.append([bounded(sampling.top_k), *padded_stops(sampling.stop_token_ids)])
            real.append([sampling.temperature, sampling.top_p, sampling.min_p])
        index = upload(seats, torch.int64, self._device)
        self.wide.index_copy_(1, index, upload(wide, torch.int64, self._device).t())
        self.small.index_copy_(1, index, upload(small, torch.int32, self._device).t())
        self.real.index_copy_(1, index, upload(real, torch.float32, self._device).t())

    def _vacant(self) -> int:
        """A free seat; else that of the sequence which has not been computed for longest. It waits its turn, all that it drew is known, and
        it is seated again when its turn comes."""
        if not self._free:
            waiting = next(sequence for sequence in self._taken if not sequence.num_in_flight)
            self.release(waiting)
        return self._free.pop()

    def set_tokens(self, sequences: List[Sequence], tokens: Tensor) -> None:
        """tokens [n] int64 on the device, as drawn: -1 (not finite) becomes a token that may be looked up."""
        self.wide[TOKEN].index_copy_(0, upload([self.of(each) for each in sequences], torch.int64, self._device), tokens.clamp(min=0))

    def follow_pages(self, sequences: List[Sequence]) -> None:
        """Takes over the pages that sequences have got since the last call."""
        num_pages = self._num_pages
        places: list[int] = []
        pages: list[int] = []
        for sequence in [each for each in sequences if each.pages.num_pages != num_pages[each]]:
            known, now = num_pages[sequence], sequence.pages.num_pages
            start = self.of(sequence) * self.table.shape[1]
            places += range(start + known, start + now)
            pages += pages_from(sequence.pages, known)
            num_pages[sequence] = now
        if places:
            both = upload([places, pages], torch.int64, self._device)
            self._places.index_copy_(0, both[0], both[1].int())


def pages_from(table: PageTable, first: int) -> list[int]:
    """The numbers of a sequence's pages, from its page `first` on."""
    pages: list[int] = []
    for extent in table.extents:
        if first < extent.count:
            pages += range(extent.first + first, extent.end)
            first = 0
        else:
            first -= extent.count
    return pages


def padded_stops(stops: Iterable[int]) -> list[int]:
    """MAX_STOP_TOKENS numbers: the stop tokens, then -1."""
    kept = sorted(stops)
    return kept + [-1] * (MAX_STOP_TOKENS - len(kept))


def bounded(top_k: int) -> int:
    """top_k as int32 holds it. No vocabulary is as large as that: it is off."""
    return min(top_k, MAX_INT32)


def signed(seed: int) -> int:
    """The 64 bits of a seed as int64 holds them."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
