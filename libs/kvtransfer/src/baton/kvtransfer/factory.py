"""Opening an agent."""

from __future__ import annotations

from baton.kvtransfer.base import Agent
from baton.kvtransfer.config import AgentConfig


def open_agent(config: AgentConfig) -> Agent:
    """An agent of the configured backend. Close it (or use it as a context manager): that joins its threads and releases its memory.

    Raises LibraryNotFound, LibraryTooOld or LibraryConflict where UCX cannot be used, UCXError where it refuses the configuration.
    """
    if config.backend == "loopback":
        from baton.kvtransfer.loopback import LoopbackAgent

        return LoopbackAgent(config)
    from baton.kvtransfer.ucx import UcxAgent  # opens no library before an agent is wanted

    return UcxAgent(config)
