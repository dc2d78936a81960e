"""Sampling as the client asked for it, checked and filled in. Pure; a value out of range is refused, never clamped."""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Callable, Iterable

from baton.gateway.errors import OutOfRangeError, StopListError, StructuredOutputError
from baton.gateway.requests import SamplingOptions
from baton.wire.v1 import worker_pb2

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BIASED_TOKENS = 300
MAX_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 64
#: To all prompts of one request, as many answers to each of them.
MAX_ANSWERS = 128
#: Beyond these, a logit may become more than a 32-bit number holds.
REPETITION_PENALTY = (0.01, 10.0)

#: The wire's fields that a server of sampling level 0 does not know.
_LEVEL_1 = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "top_logprobs")

_IDLE = SamplingOptions(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)

#: Numbers up to this one are 0 as the 32-bit number that servers compute with.
LEAST_TOP_P = 2.0**-150


def check_ranges(options: SamplingOptions, vocab_size: int, context: Callable[[], int]) -> None:
    """Everything that does not depend on the prompt. context: tokens of prompt and answer that the fleet takes, 0 while no server is there to say it;
    asked only when something is wrong.

    Raises OutOfRangeError, StopListError.
    """
    _check_float(options, "temperature", 0.0, 2.0)
    _check_float(options, "top_p", 0.0, 1.0, open_low=True)
    _check_float(options, "min_p", 0.0, 1.0)
    _check_float(options, "repetition_penalty", *REPETITION_PENALTY)
    _check_float(options, "presence_penalty", -2.0, 2.0)
    _check_float(options, "frequency_penalty", -2.0, 2.0)
    _check_int(options, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    _check_int(options, "prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    _check_int(options, "top_k", 0, vocab_size)
    _check_int(options, "seed", 0, 2**64 - 1)
    _check_int(options, "n", 1, MAX_CHOICES)
    if options.max_tokens is not None and options.max_tokens < (0 if options.prompt_only else 1):
        limit = context()
        most = f"[1, {limit - 1}]" if limit else "[1, the context)"
        remedy = "prompt and answer share the context; leave it out for an answer as long as there is place" + _with_echo(options)
        raise OutOfRangeError(options.name("max_tokens"), options.max_tokens, most, remedy)
    if options.min_tokens is not None and options.min_tokens < 0:
        largest = options.max_tokens or context() - 1
        raise OutOfRangeError(options.name("min_tokens"), options.min_tokens, f"[0, {largest}]" if largest > 0 else "[0, max_tokens]")
    _check_stop_strings(options)
    _check_stop_tokens(options, vocab_size)
    _check_bias(options, vocab_size)
    _check_structure(options)


def beyond_level(options: SamplingOptions, level: int) -> str:
    """The first field, by the client's name, that asks for something which servers of that sampling level do not know; empty: none does."""
    if options.prompt_logprobs is not None and level < 3:
        return options.name("prompt_logprobs")
    if options.structure is not None and level < 2:
        return options.structure.field
    asked = (field for field in _LEVEL_1 if getattr(options, field) not in (None, getattr(_IDLE, field)))
    return "" if level >= 1 else options.name(next(asked, ""))


def level_of(options: SamplingOptions) -> int:
    """The least sampling level of servers that know everything which is asked for."""
    return next(level for level in (0, 1, 2, 3) if not beyond_level(options, level))


def fill(options: SamplingOptions, max_tokens: int, eos_token_ids: Iterable[int]) -> worker_pb2.Sampling:
    """The wire's Sampling with every default filled in; a seed is drawn when the client gave none."""
    most = 0 if options.prompt_only else max_tokens
    if options.min_tokens is not None and options.min_tokens > most:
        raise OutOfRangeError(options.name("min_tokens"), options.min_tokens, f"[0, {most}]", "max_tokens is the limit")
    stop_ids = {*options.stop_token_ids, *(() if options.ignore_eos else eos_token_ids)}
    filled = worker_pb2.Sampling(
        temperature=1.0 if options.temperature is None else options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
        top_k=options.top_k or 0,
        min_p=options.min_p or 0.0,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
        max_tokens=max_tokens,
        min_tokens=options.min_tokens or 0,
        stop_token_ids=sorted(stop_ids),
        repetition_penalty=1.0 if options.repetition_penalty is None else options.repetition_penalty,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        bias_token_ids=[token for token, _ in options.logit_bias],
        bias_values=[value for _, value in options.logit_bias],
    )
    if options.structure is not None:
        filled.grammar = options.structure.grammar
    if options.top_logprobs is not None:
        filled.top_logprobs = options.top_logprobs
    if options.prompt_logprobs is not None:
        filled.prompt_logprobs = options.prompt_logprobs
    return filled


def _with_echo(options: SamplingOptions) -> str:
    return "" if options.max_tokens else ". 0 goes with echo (completions), for the prompt alone"


def _check_float(options: SamplingOptions, field: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(options, field)
    if value is None:
        return
    allowed = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    above = value > low if open_low else value >= _as_float32(low)
    if not (math.isfinite(value) and above and value <= high):
        raise OutOfRangeError(options.name(field), value, allowed)
    if open_low and not _as_float32(value) > low:
        raise OutOfRangeError(options.name(field), value, allowed, f"as the 32-bit number that servers compute with it is {low:g}")


def _as_float32(value: float) -> float:
    """As the wire to the servers carries it."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def _check_int(options: SamplingOptions, field: str, low: int, high: int) -> None:
    value = getattr(options, field)
    if value is not None and not low <= value <= high:
        raise OutOfRangeError(options.name(field), value, f"[{low}, {high}]")


def _check_stop_strings(options: SamplingOptions) -> None:
    name = options.name("stop")
    if len(options.stop) > MAX_STOP_STRINGS:
        raise StopListError(name, f"{name} has {len(options.stop)} strings, the limit is {MAX_STOP_STRINGS}: send fewer")
    for number, text in enumerate(options.stop):
        if not text:
            raise StopListError(f"{name}[{number}]", f"{name}[{number}] is empty: every answer would end at once; leave it out")
        if len(text) > MAX_STOP_CHARS:
            raise StopListError(f"{name}[{number}]", f"{name}[{number}] has {len(text)} characters, the limit is {MAX_STOP_CHARS}: shorten it")


def _check_bias(options: SamplingOptions, vocab_size: int) -> None:
    name = options.name("logit_bias")
    if len(options.logit_bias) > MAX_BIASED_TOKENS:
        raise OutOfRangeError(name, f"{len(options.logit_bias)} tokens", f"[0, {MAX_BIASED_TOKENS}] tokens", "name fewer")
    for token, value in options.logit_bias:
        if not 0 <= token < vocab_size:
            raise OutOfRangeError(f"{name}[{token}]", token, f"the vocabulary [0, {vocab_size})")
        if not (math.isfinite(value) and -MAX_BIAS <= value <= MAX_BIAS):
            raise OutOfRangeError(f"{name}[{token}]", value, f"[{-MAX_BIAS:g}, {MAX_BIAS:g}]")


def _check_structure(options: SamplingOptions) -> None:
    if options.structure is None:
        return
    for field, value in (("min_tokens", options.min_tokens), ("ignore_eos", options.ignore_eos)):
        if value:
            why = "which says itself where an answer ends: leave one of them out"
            raise StructuredOutputError(options.name(field), f"{options.name(field)}={value} does not go with {options.structure.field}, {why}")


def _check_stop_tokens(options: SamplingOptions, vocab_size: int) -> None:
    name = options.name("stop_token_ids")
    if len(options.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise StopListError(name, f"{name} has {len(options.stop_token_ids)} ids, the limit is {MAX_STOP_TOKEN_IDS}: send fewer")
    for number, token in enumerate(options.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise OutOfRangeError(f"{name}[{number}]", token, f"the vocabulary [0, {vocab_size})")
