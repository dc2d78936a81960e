"""Whether a forward pass is still wanted by anybody: asked on the host before each of its layers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from baton.engine.types import Failure


class GivenUp:
    """`given_up(layer)` of one pass: True when every one of its rooms is being ended, and the pass is to leave before that layer.

    rooms: of the pass. ending: the rooms that are being ended; somebody else writes it, from any thread.
    Ranks ask for the same layers, each when it comes to them: who asks first decides for all. So they leave before the same layer, and no
    collective is launched by some of them only.
    """

    def __init__(self, rooms: Iterable[int], ending: Mapping[int, Failure]) -> None:
        self.rooms = tuple(rooms)
        self._ending = ending
        self._lock = threading.Lock()
        self._num_wanted = 0
        #: The layer before which the pass left; None: it did not.
        self.at: int | None = None

    def __call__(self, layer: int) -> bool:
        with self._lock:
            if self.at is None and layer >= self._num_wanted:
                if all(room in self._ending for room in self.rooms):
                    self.at = layer
                else:
                    self._num_wanted = layer + 1
            return self.at is not None and layer >= self.at
