"""The shipped fake: the same face and the same rules in one process, without UCX. For tests of what is built on this library."""

from __future__ import annotations

from baton.kvtransfer.loopback.agent import LoopbackAgent

__all__ = ["LoopbackAgent"]
