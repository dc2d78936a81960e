"""Which rooms have their pages digested on both sides. Pure."""

from __future__ import annotations

from typing import Literal

#: One room in so many, in mode "sample". Room numbers are random, so their remainder is too.
SAMPLE_ONE_IN = 16

DigestMode = Literal["off", "sample", "all"]


class DigestSampler:
    def __init__(self, mode: DigestMode) -> None:
        self._mode = mode

    def wants(self, room: int) -> bool:
        if self._mode == "sample":
            return room % SAMPLE_ONE_IN == 0
        return self._mode == "all"
