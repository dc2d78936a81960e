"""The process that something was made in. A fork has the object without the threads behind it, and with descriptors and memory of the parent."""

from __future__ import annotations

import os

from baton.kvtransfer.errors import Closed


class Birthplace:
    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a fork's copy: what it would wait for is not here, and what it would close is the parent's."""
        return os.getpid() != self._pid

    def require(self) -> None:
        """Raises Closed in a fork. Before any lock: a thread that is not here may have held it."""
        if self.is_elsewhere:
            raise Closed("this agent was opened in another process: its threads do not live on after a fork; open one here")
