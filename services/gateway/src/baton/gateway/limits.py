"""How long a request a route takes: the models' contexts and the KV pools of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.worker import Leg, Worker


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of tokens and what sets it, for messages."""

    num_tokens: int
    because: str


@dataclass(frozen=True, slots=True)
class RouteLimits:
    """context: prompt and answer together. prompt: the prompt alone; it leaves place for one token of answer. sampling_level: which fields of the
    wire's Sampling all servers heed, as the proto counts them; older_server: one that heeds no more. takes_forks: several answers to one prompt."""

    context: Limit
    prompt: Limit
    sampling_level: int = 0
    older_server: str = ""
    takes_forks: bool = True


def limits_of(servers: Sequence[Worker]) -> RouteLimits:
    """The tightest limits of a route's servers. The prompt must fit every pool; the answer only grows in decode's or a plain server's."""
    contexts: list[Limit] = []
    prompts: list[Limit] = []
    for server in servers:
        assert server.info is not None
        contexts.append(Limit(server.info.max_model_len, f"the context of {server.label}"))
        pages = f"{server.load.total_pages} pages of {server.info.fingerprint.page_size} tokens"
        pool = Limit(server.pool_tokens, f"the KV pool of {server.label} ({pages})")
        (prompts if server.leg is Leg.PREFILL else contexts).append(pool)
    context = min(contexts, key=_size)
    prompts.append(Limit(context.num_tokens - 1, f"{context.because}, less one token for the answer"))
    level, older = min((server.info.sampling_level, server.label) for server in servers if server.info is not None)
    last = servers[-1].info
    return RouteLimits(context, min(prompts, key=_size), level, older, takes_forks=last is not None and last.takes_forks)


def _size(limit: Limit) -> int:
    return limit.num_tokens
