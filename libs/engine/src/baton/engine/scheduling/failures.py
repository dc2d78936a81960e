"""The failures that an engine itself decides on. `cause` is a bounded word; the message has the numbers."""

from __future__ import annotations

from baton.engine.scheduling.sequence import Limits
from baton.engine.types import Failure, Request, Role

#: A plain server is the decode service in another role.
ORIGINS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.PLAIN: "decode"}


def refusal(request: Request, limits: Limits, role: Role) -> Failure | None:
    """Why this engine can never serve `request`, or None. Decode and plain also need a place for one token of answer."""
    prompt = request.prompt
    answer = 0 if role is Role.PREFILL else 1
    limit = limits.max_model_len - answer
    if not prompt:
        return _invalid(role, "prompt_empty", "prompt has 0 tokens; the least is 1")
    if len(prompt) > limit:
        message = (
            f"prompt has {len(prompt)} tokens; this {role.value} server takes at most {limit} "
            f"(context of {limits.max_model_len} tokens for prompt and answer): shorten the prompt"
        )
        return _invalid(role, "prompt_too_long", message)
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        worst = min(prompt) if min(prompt) < 0 else max(prompt)
        return _invalid(role, "token_out_of_range", f"prompt holds token id {worst}; the vocabulary is 0 to {limits.vocab_size - 1}")
    if request.sampling.max_tokens < 1:
        return _invalid(role, "max_tokens_too_small", f"max_tokens = {request.sampling.max_tokens}; the least is 1")
    return None


def expired(request: Request, now: float, bootstrapping: bool, waiting: bool, role: Role) -> Failure | None:
    """Which of the request's clocks has run out, if any. `bootstrapping`, `waiting`: which of its two stages the room is in."""
    if request.deadline is not None and now >= request.deadline:
        return _late(request, now, role, "deadline", "the request's deadline passed")
    if bootstrapping and request.bootstrap_deadline is not None and now >= request.bootstrap_deadline:
        missing = "decode published no pages" if role is Role.PREFILL else "no pages could be reserved"
        return _late(request, now, role, "bootstrap_timeout", f"{missing} in time")
    if waiting and request.waiting_deadline is not None and now >= request.waiting_deadline:
        missing = "the prompt's turn did not come" if role is not Role.DECODE else "the prompt's KV pages did not land"
        return _late(request, now, role, "waiting_timeout", f"{missing} in time")
    return None


def not_finite(role: Role) -> Failure:
    message = "the logits are not finite (NaN or infinity): the weights or the KV pages of this room are damaged"
    return Failure("INTERNAL", ORIGINS[role], "logits_not_finite", message)


def grammar_fault(request: Request) -> Failure | None:
    """Why no token may come next, where a request's grammar is the reason: its client's, not this server's."""
    grammar = request.sampling.grammar
    if grammar is None or not grammar.fault:
        return None
    message = f"the answer cannot be held to its grammar any longer: {grammar.fault}; simplify the schema or grammar"
    return Failure("INVALID_ARGUMENT", "client", "grammar_fault", message)


def no_such_token(token: int, vocab_size: int) -> Failure:
    """What a prefill server rang the doorbell with."""
    message = f"prefill's first token is {token}, the vocabulary is [0, {vocab_size}): do both servers serve the same model?"
    return Failure("DATA_LOSS", "prefill", "no_such_token", message)


def no_source(source: int, role: Role) -> Failure:
    """Of a fork that came when the room that it names was not there (any more)."""
    return Failure("ABORTED", ORIGINS[role], "fork_source_gone", f"room {source}, whose prompt this room was to go on behind, is not open here")


def lease_lost(role: Role) -> Failure:
    return Failure("INTERNAL", ORIGINS[role], "lease_lost", "the pages were freed although their transfer was not over")


def _invalid(role: Role, cause: str, message: str) -> Failure:
    return Failure("INVALID_ARGUMENT", ORIGINS[role], cause, message)


def _late(request: Request, now: float, role: Role, cause: str, what: str) -> Failure:
    return Failure("DEADLINE_EXCEEDED", ORIGINS[role], cause, f"{what} ({now - request.arrived:.1f} s after the request arrived)")
