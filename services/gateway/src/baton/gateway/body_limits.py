"""How large a request may be before anything of it is read: what the longest prompt of the model can need. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.gateway.token_bound import TokenBound

#: Without a context that is known, and never more by itself.
MOST_BYTES = 16 * 1024 * 1024
#: JSON spells a byte of text with at most six: \u0041.
_ESCAPED_BYTES = 6
#: For whatever a body has besides its prompt.
_FRAME_BYTES = 1024 * 1024

#: A message of a chat is an object of two or three fields: nine values with their names, and at least one token.
_VALUES_A_TOKEN = 9
_FRAME_VALUES = 16_384
#: Of a model whose folder does not say its context.
_CONTEXT_TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """num_values: numbers, texts (names of fields as well) and separators of JSON; messages of a chat over gRPC."""

    num_bytes: int = MOST_BYTES
    num_values: int = _FRAME_VALUES + _VALUES_A_TOKEN * _CONTEXT_TOKENS


def body_limits(set_bytes: int | None, context_tokens: int | None, bound: TokenBound) -> BodyLimits:
    """set_bytes: the operator's own limit, if there is one. context_tokens: None where the model's folder does not say it."""
    num_values = _FRAME_VALUES + _VALUES_A_TOKEN * (context_tokens or _CONTEXT_TOKENS)
    if set_bytes is not None:
        return BodyLimits(set_bytes, num_values)
    if context_tokens is None or bound.reason:
        return BodyLimits(MOST_BYTES, num_values)
    return BodyLimits(min(MOST_BYTES, _FRAME_BYTES + _ESCAPED_BYTES * bound.longest_bytes * context_tokens), num_values)
