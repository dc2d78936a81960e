"""OpenAI's request bodies to the gateway's own requests. Pure. Nothing that would change an answer is ignored."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from baton.gateway.errors import MissingFieldError, OutOfRangeError, RequestError, WrongTypeError
from baton.gateway.http.fields import Fields, is_integer, shown
from baton.gateway.http.messages import message
from baton.gateway.http.structure import response_structure
from baton.gateway.http.tools import offered
from baton.gateway.requests import ChatPrompt, Prompt, SamplingOptions, TextPrompt, TokenPrompt
from baton.gateway.sampling import MAX_ANSWERS
from baton.gateway.structured import Structure
from baton.gateway.tools.offer import forced_structure

#: OpenAI's own default for /v1/completions; a chat's is what is left of the context.
DEFAULT_COMPLETION_TOKENS = 16

#: Hints that no answer depends on.
HINTS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

_LATER = "leave it out"


@dataclass(frozen=True, slots=True)
class ParsedBody:
    model: str
    prompt: Prompt
    sampling: SamplingOptions
    stream: bool
    include_usage: bool
    request_id: str
    priority: int
    #: Log probabilities of the prompt in a field of their own, and of so many of the most probable tokens.
    prompt_logprobs: int | None = None
    #: The prompt's text comes before the answer's.
    echo: bool = False
    more_prompts: tuple[Prompt, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    model: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    model: str
    tokens: list[int]


def parse_chat(body: dict[str, Any]) -> ParsedBody:
    """A body of /v1/chat/completions. Raises RequestError."""
    fields = Fields(body)
    prompt = _chat_prompt(fields)
    limit_name, limit = _chat_limit(fields)
    top_logprobs = _chat_logprobs(fields)
    prompt = replace(prompt, offer=offered(fields))
    structure = forced_structure(prompt.offer, response_structure(fields), "tool_choice")
    fields.only("modalities", (["text"],), "only text is produced")
    return _finish(fields, prompt, limit_name, limit, top_logprobs, "top_logprobs", structure)


def parse_completion(body: dict[str, Any]) -> ParsedBody:
    """A body of /v1/completions. Raises RequestError."""
    fields = Fields(body)
    prompt, *more_prompts = _completion_prompts(fields.required("prompt", fields.raw("prompt")))
    limit = fields.integer("max_tokens")
    fields.only("best_of", (1,), "every answer that is made is given: say how many with n")
    top_logprobs = fields.integer("logprobs")
    echo = fields.boolean("echo") or False
    fields.only("suffix", ("",), _LATER)
    structure = response_structure(fields)
    limit = DEFAULT_COMPLETION_TOKENS if limit is None else limit
    parsed = _finish(fields, prompt, "max_tokens", limit, top_logprobs, "logprobs", structure)
    if echo and top_logprobs is not None:  # those of the prompt come with it
        wanted = max(top_logprobs, parsed.prompt_logprobs or 0)
        names = {"prompt_logprobs": "logprobs" if parsed.prompt_logprobs is None else "prompt_logprobs"}
        parsed = replace(parsed, sampling=replace(parsed.sampling, prompt_logprobs=wanted, names=parsed.sampling.names | names))
    sampling = replace(parsed.sampling, prompt_only=echo and limit == 0)
    return replace(parsed, sampling=sampling, echo=echo, more_prompts=tuple(more_prompts))


def parse_tokenize(body: dict[str, Any]) -> TokenizeBody:
    """A body of /tokenize: a prompt, or a chat's messages. Raises RequestError."""
    fields = Fields(body)
    if fields.has("prompt") == fields.has("messages"):
        raise MissingFieldError("prompt", "one of prompt and messages must be given, and not both")
    if fields.has("prompt"):
        fields.raw("messages")
        prompt: Prompt = TextPrompt(fields.required("prompt", fields.text("prompt")), "prompt")
    else:
        fields.raw("prompt")
        prompt = _chat_prompt(fields)
    model = fields.required("model", fields.text("model"))
    fields.only("add_special_tokens", (True,), "they are added, as they are for an answer")
    fields.only("add_generation_prompt", (True,), "it is added, as it is for an answer")
    fields.refuse_rest()
    return TokenizeBody(model, prompt)


def parse_detokenize(body: dict[str, Any]) -> DetokenizeBody:
    """A body of /detokenize. Raises RequestError."""
    fields = Fields(body)
    model = fields.required("model", fields.text("model"))
    tokens = fields.required("tokens", fields.integers("tokens") if fields.has("tokens") else None)
    fields.refuse_rest()
    return DetokenizeBody(model, list(tokens))


def _finish(
    fields: Fields,
    prompt: Prompt,
    limit_name: str,
    limit: int | None,
    top_logprobs: int | None,
    logprobs_name: str,
    structure: Structure | None,
) -> ParsedBody:
    """What both kinds of body have in common; refuses what is left."""
    model = fields.required("model", fields.text("model"))
    names = {"max_tokens": limit_name, "top_logprobs": logprobs_name}
    sampling = replace(_sampling(fields, limit), top_logprobs=top_logprobs, structure=structure, names=names)
    stream = fields.boolean("stream") or False
    include_usage = _include_usage(fields, stream)
    request_id = fields.text("request_id") or ""
    priority = fields.integer("priority") or 0
    for hint in HINTS:
        fields.raw(hint)
    fields.refuse_rest()
    if stream and sampling.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs", "prompt_logprobs is for stream=false only: leave it out, or ask for echo and logprobs")
    return ParsedBody(model, prompt, sampling, stream, include_usage, request_id, priority, sampling.prompt_logprobs)


def _sampling(fields: Fields, limit: int | None) -> SamplingOptions:
    seed = fields.integer("seed")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise OutOfRangeError("seed", seed, f"[{-(2**63)}, {2**64 - 1}]")
    if seed is not None and seed < 0:
        seed += 2**64  # OpenAI's seed is a signed 64-bit number; ours is the same bits unsigned
    return SamplingOptions(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k"),
        min_p=fields.number("min_p"),
        seed=seed,
        max_tokens=limit,
        min_tokens=fields.integer("min_tokens"),
        stop=_stop(fields.raw("stop")),
        stop_token_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos") or False,
        repetition_penalty=fields.number("repetition_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        logit_bias=_bias(fields.mapping("logit_bias")),
        n=fields.integer("n"),
        prompt_logprobs=fields.integer("prompt_logprobs"),
    )


def _bias(given: dict[str, Any] | None) -> tuple[tuple[int, float], ...]:
    """JSON's names are strings: each is a token id in decimal digits."""
    bias = {}
    for name, value in (given or {}).items():
        path = f"logit_bias.{shown(name)}"
        if not (_TOKEN_ID.fullmatch(name) and isinstance(value, int | float) and not isinstance(value, bool)):
            raise WrongTypeError(path, f"{path}={shown(value)}: the name must be a token id in decimal digits, and the value a number")
        bias[int(name)] = float(value) if abs(value) <= sys.float_info.max else math.inf
    return tuple(sorted(bias.items()))


def _chat_logprobs(fields: Fields) -> int | None:
    """How many of the most probable tokens are told with each; None: no log probabilities at all."""
    wanted, top = fields.boolean("logprobs") or False, fields.integer("top_logprobs")
    if top and not wanted:
        raise RequestError("top_logprobs", f"top_logprobs={top} is for logprobs=true only: set that too, or leave it out")
    return (top or 0) if wanted else None


def _chat_prompt(fields: Fields) -> ChatPrompt:
    messages = fields.required("messages", fields.array("messages"))
    if not messages:
        raise MissingFieldError("messages", "messages is empty: a conversation has at least one message")
    return ChatPrompt([message(one, f"messages[{number}]") for number, one in enumerate(messages)])


def _chat_limit(fields: Fields) -> tuple[str, int | None]:
    """OpenAI renamed max_tokens; clients send either, some send both."""
    new, old = fields.integer("max_completion_tokens"), fields.integer("max_tokens")
    if new is not None and old is not None and new != old:
        text = f"max_tokens={old} and max_completion_tokens={new} are two names of one limit and differ: send one"
        raise RequestError("max_tokens", text)
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise WrongTypeError("stop", f"stop={shown(value)} must be a string or an array of strings")


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.mapping("stream_options")
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options", "stream_options is for stream=true only: leave it out")
    inner = Fields(options, "stream_options")
    include_usage = inner.boolean("include_usage") or False
    inner.only("include_obfuscation", (False,), _LATER)
    inner.refuse_rest()
    return include_usage


def _completion_prompts(value: Any) -> list[Prompt]:
    """Text, token ids, or a list of either: at least one."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return [_completion_prompt(value, "prompt", "a string, an array of token ids, or an array of one of these")]
    if len(value) > MAX_ANSWERS:
        raise OutOfRangeError("prompt", f"{len(value)} prompts", f"[1, {MAX_ANSWERS}] prompts", "send fewer at once")
    if len(value) == 1:
        return [_completion_prompt(value[0], "prompt", "a string or an array of token ids")]
    kind, expected = (str, "a string, as the first one") if isinstance(value[0], str) else (list, "an array of token ids, as the first one")
    for number, one in enumerate(value):
        if not isinstance(one, kind):
            raise WrongTypeError(f"prompt[{number}]", f"prompt[{number}]={shown(one)} must be {expected}")
    return [_completion_prompt(one, f"prompt[{number}]", expected) for number, one in enumerate(value)]


def _completion_prompt(value: Any, path: str, expected: str) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value, path)
    if isinstance(value, list) and all(is_integer(item) for item in value):
        return TokenPrompt(value, path)
    raise WrongTypeError(path, f"{path}={shown(value)} must be {expected}")
