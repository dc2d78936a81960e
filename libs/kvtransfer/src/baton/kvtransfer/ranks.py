"""The transfer library's side of a server with several ranks: one pool each, with the agent of its device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from baton.kvtransfer.base import Agent, Region
from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.factory import open_agent


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's pool. Ranks of one device share its agent."""

    agent: Agent
    region: Region


@dataclass(frozen=True, slots=True)
class RankMemories:
    """ranks: in order. agents: each once. Close it after whatever uses the pools."""

    ranks: tuple[RankMemory, ...]
    agents: tuple[Agent, ...]

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(rank.region for rank in self.ranks)

    def close(self) -> None:
        """Idempotent. Waits for peers that are still open to be flushed."""
        for region in self.regions:
            region.close()
        for agent in self.agents:
            agent.close()


def open_ranks(config: AgentConfig, devices: Sequence[str], num_bytes: int, addresses: Sequence[int] | None = None) -> RankMemories:
    """A pool of `num_bytes` for each rank, on the device that `devices` names for it (as `AgentConfig.device` does).

    addresses: where the pools are, in memory that somebody else owns; None: they are allocated here, in host memory. Raises what `open_agent`,
    `allocate` and `register` raise; nothing stays open then.
    """
    agents: dict[str, Agent] = {}
    ranks = []
    with ExitStack() as undo:
        for number, device in enumerate(devices):
            if device not in agents:
                agents[device] = open_agent(replace(config, device=device))
                undo.callback(agents[device].close)
            agent = agents[device]
            region = agent.allocate(num_bytes) if addresses is None else agent.register(addresses[number], num_bytes)
            undo.callback(region.close)
            ranks.append(RankMemory(agent, region))
        undo.pop_all()
    return RankMemories(tuple(ranks), tuple(agents.values()))
