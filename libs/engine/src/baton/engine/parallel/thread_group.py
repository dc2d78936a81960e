"""Ranks that are threads of one process, over CPU tensors: they meet at a barrier and read each other's memory."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from baton.engine.models.collective import in_order


class Meeting:
    """What the ranks of one group share: a barrier, and two sets of places for tensors.

    The sets are used in turns, so one barrier a call is enough: who puts something into a set again has met all others since they read it.
    """

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.places: tuple[list[Tensor], list[Tensor]] = ([torch.empty(0)] * size, [torch.empty(0)] * size)


class ThreadGroup:
    """One rank's end of a `Meeting`. Sums are added up in the order of ranks, so a row's result does not depend on the number of rows."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self._turn = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.barrier.parties

    def sum_(self, partial: Tensor) -> Tensor:
        return in_order(self._exchange(partial))

    def gather_columns(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchange(part), dim=-1)

    def abort(self) -> None:
        self._meeting.barrier.abort()

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """Everyone's tensor. They are read only, and only until the next call."""
        places = self._meeting.places[self._turn]
        self._turn ^= 1
        places[self._rank] = own
        self._meeting.barrier.wait()
        return places
