"""When a prompt is computed on the decode server itself. The rule is pure: what it knows of the servers is given to it as numbers.

A short prompt costs decode little, and the way through a prefill server costs a hand-over, whatever the prompt. So a prompt of at most
`max_tokens` tokens that decode does not hold yet goes to decode when decode is predicted to be done with it no later than prefill would be and
its pages be there:

    (pending on decode + what is not cached there) / decode's speed
        <=    (pending on prefill + what is not cached there) / prefill's speed + hand-over

What is cached is what servers tell of their prefix caches, which they are asked for under `--routing prefix-aware`; else nothing is taken to be: a
guess that is wrong would make decode's answers wait for a long prompt.

Speeds and pending tokens are what the servers report. The hand-over is what this gateway measured on its own rooms (from their start until prefill
knew decode's pages, and from the last layer until decode saw the doorbell). A speed that nobody has measured yet is taken to be the other server's;
where neither is known the tokens themselves are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.gateway.fleet import Route
from baton.gateway.limits import limits_of
from baton.gateway.report import Passage
from baton.gateway.room import Room, State
from baton.gateway.worker import Leg, Worker

#: How much the newest room counts in the mean of hand-overs.
_NEWEST = 0.1


@dataclass(frozen=True, slots=True)
class Side:
    """One server's word: tokens of prompts that it has not computed yet, how many it computes a second (0: not measured), and leading tokens of this
    prompt that it holds."""

    pending_tokens: int
    tokens_per_s: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """reason: a bounded word, for counters. The predictions are seconds, 0 where none was made."""

    on_decode: bool
    reason: str
    decode_s: float = 0.0
    prefill_s: float = 0.0


def judge(num_tokens: int, *, max_tokens: int, decode: Side, prefill: Side, hand_over_s: float) -> Verdict:
    """The rule. max_tokens: 0 is off."""
    missing = num_tokens - decode.cached_tokens
    if missing > max_tokens or not max_tokens:
        return Verdict(False, "too_long" if max_tokens else "off")
    missing_on_prefill = num_tokens - prefill.cached_tokens
    speed = decode.tokens_per_s or prefill.tokens_per_s
    if not speed:
        cheaper = decode.pending_tokens + missing <= prefill.pending_tokens + missing_on_prefill
        return Verdict(cheaper, "fewer_tokens" if cheaper else "more_tokens")
    decode_s = (decode.pending_tokens + missing) / speed
    prefill_s = (prefill.pending_tokens + missing_on_prefill) / (prefill.tokens_per_s or speed) + hand_over_s
    cheaper = decode_s <= prefill_s
    return Verdict(cheaper, "cheaper" if cheaper else "dearer", decode_s, prefill_s)


def local_routes(workers: Iterable[Worker]) -> list[Route]:
    """One for each decode server that takes new rooms: prefill and decode there."""
    return [_alone(worker) for worker in workers if worker.leg is Leg.DECODE and worker.info is not None and not worker.unusable_because]


class LocalPrefill:
    """Applies the rule to routes that were chosen, and measures the hand-overs of rooms that took the other way."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.hand_over_s = 0.0
        #: Reason of a verdict -> how many requests.
        self.decisions: Counter[str] = Counter()

    def place(self, route: Route, prompt: Sequence[int], cached_on: Callable[[Worker], int]) -> Route:
        """`route`, or its decode server alone. cached_on: leading tokens of the prompt that a server says it holds."""
        if not self._max_tokens or not route.is_split:
            return route
        prefill, decode = route.servers
        verdict = judge(
            len(prompt),
            max_tokens=self._max_tokens,
            decode=_side(decode, cached_on(decode)),
            prefill=_side(prefill, cached_on(prefill)),
            hand_over_s=self.hand_over_s,
        )
        self.decisions[verdict.reason] += 1
        return _alone(decode) if verdict.on_decode else route

    def note(self, machine: Room, passage: Passage) -> None:
        """A room has come through both servers: what the way between them took."""
        waiting, began = machine.entered.get(State.WAITING), machine.entered.get(State.BOOTSTRAPPING)
        if passage.transfer is None or waiting is None or began is None:
            return
        took_s = waiting - began + (passage.exposed_ms or passage.transfer.exposed_ms) / 1e3
        self.hand_over_s = took_s if not self.hand_over_s else self.hand_over_s + _NEWEST * (took_s - self.hand_over_s)


def _side(worker: Worker, cached_tokens: int) -> Side:
    return Side(worker.load.pending_prompt_tokens, worker.load.prompt_tokens_per_s, cached_tokens)


def _alone(decode: Worker) -> Route:
    return Route((decode,), limits_of((decode,)))
