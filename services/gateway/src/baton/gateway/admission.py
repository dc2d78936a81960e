"""What may become a room: the prompt's length and max_tokens against what the routes hold. Pure; nothing is reserved here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.gateway.errors import EmptyPromptError, OutOfRangeError, PromptTooLongError, UnsupportedError
from baton.gateway.limits import Limit, RouteLimits
from baton.gateway.requests import SamplingOptions
from baton.gateway.sampling import beyond_level, fill, level_of
from baton.wire.v1 import worker_pb2


class Limited(Protocol):
    @property
    def limits(self) -> RouteLimits: ...


R = TypeVar("R", bound=Limited)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt that fits at least one route."""

    prompt: list[int]
    sampling: worker_pb2.Sampling
    stop: tuple[str, ...]
    #: Which fields of the wire's Sampling it needs.
    sampling_level: int = 0
    #: Answers to the prompt that its room is to be the source of, itself included.
    num_choices: int = 1
    #: Where the client says what the answer must look like, for messages; empty: nowhere.
    structure_field: str = ""
    #: The one token that servers make of it is not given out.
    prompt_only: bool = False


def check_tokens(ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Raises OutOfRangeError for a token that the model has not."""
    for number, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise OutOfRangeError(f"{field}[{number}]", token, f"the vocabulary [0, {vocab_size})")


def admit(prompt: list[int], field: str, options: SamplingOptions, routes: Sequence[R], eos_token_ids: Iterable[int]) -> tuple[Admitted, list[R]]:
    """The filled-in request and the routes that can take it, at least one. `options` have passed `check_ranges`; `routes` is not empty.

    Raises EmptyPromptError, PromptTooLongError, UnsupportedError, OutOfRangeError (max_tokens, min_tokens) with the numbers.
    """
    if not prompt:
        raise EmptyPromptError(field, f"{field} is empty: it must have at least one token")
    level = level_of(options)
    takers = _fitting_prompt(len(prompt), field, _forking(options, _heeding(options, level, routes)))
    roomiest = max(takers, key=_context)
    left = _context(roomiest) - len(prompt)
    max_tokens = 1 if options.prompt_only else left if options.max_tokens is None else options.max_tokens
    if max_tokens > left:
        why = f"the prompt has {len(prompt)} of {_context(roomiest)} tokens ({roomiest.limits.context.because})"
        raise OutOfRangeError(options.name("max_tokens"), max_tokens, f"[1, {left}]", why)
    structure_field = "" if options.structure is None else options.structure.field
    admitted = Admitted(prompt, fill(options, max_tokens, eos_token_ids), options.stop, level, options.n or 1, structure_field, options.prompt_only)
    return admitted, fitting(admitted, takers)


def fitting(admitted: Admitted, routes: Sequence[R]) -> list[R]:
    """The routes that can take a request that was admitted, which may be others than those that were there then."""
    num_tokens = len(admitted.prompt)
    whole = num_tokens + admitted.sampling.max_tokens
    heeding = [route for route in routes if route.limits.sampling_level >= admitted.sampling_level]
    heeding = [route for route in heeding if admitted.num_choices == 1 or route.limits.takes_forks]
    return [route for route in heeding if num_tokens <= route.limits.prompt.num_tokens and whole <= _context(route)]


def longest_prompt(routes: Sequence[Limited]) -> Limit:
    """What the roomiest of the routes takes; there is at least one."""
    return max((route.limits.prompt for route in routes), key=lambda limit: limit.num_tokens)


def too_long(field: str, found: str, limit: Limit) -> PromptTooLongError:
    """found: what the prompt has, in words."""
    return PromptTooLongError(field, f"{field} has {found}, the limit is {limit.num_tokens} ({limit.because}): shorten it")


def _heeding(options: SamplingOptions, level: int, routes: Sequence[R]) -> Sequence[R]:
    """Routes whose servers know everything that the request asks for: what one does not know it would ignore."""
    heeding = [route for route in routes if route.limits.sampling_level >= level]
    if not heeding:
        older = routes[0].limits.older_server
        field = beyond_level(options, routes[0].limits.sampling_level)
        raise UnsupportedError(field, f"{field} is not supported by {older}, which is of an older version: leave it out, or update the server")
    return heeding


def _forking(options: SamplingOptions, routes: Sequence[R]) -> Sequence[R]:
    """Routes whose last server makes as many answers of one prompt as are asked for."""
    if (options.n or 1) == 1:
        return routes
    forking = [route for route in routes if route.limits.takes_forks]
    if not forking:
        field = options.name("n")
        raise UnsupportedError(field, f"{field}={options.n} is not supported by any decode server here, all are of an older version: leave it out")
    return forking


def _fitting_prompt(num_tokens: int, field: str, routes: Sequence[R]) -> list[R]:
    fitting = [route for route in routes if num_tokens <= route.limits.prompt.num_tokens]
    if not fitting:
        raise too_long(field, f"{num_tokens} tokens", longest_prompt(routes))
    return fitting


def _context(route: Limited) -> int:
    return route.limits.context.num_tokens
