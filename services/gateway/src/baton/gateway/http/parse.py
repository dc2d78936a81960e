"""OpenAI's request bodies to the gateway's own requests. Pure. Nothing that would change an answer is ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.gateway.errors import MissingFieldError, OutOfRangeError, RequestError, UnsupportedError, WrongTypeError
from baton.gateway.http.fields import Fields, is_integer, shown
from baton.gateway.requests import ChatPrompt, Prompt, SamplingOptions, TextPrompt, TokenPrompt

#: OpenAI's own default for /v1/completions; a chat's is what is left of the context.
DEFAULT_COMPLETION_TOKENS = 16

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")

#: Hints that no answer depends on.
HINTS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

_LATER = "leave it out"
_ONE = "it must be 1; send a request for each answer"


@dataclass(frozen=True, slots=True)
class ParsedBody:
    model: str
    prompt: Prompt
    sampling: SamplingOptions
    stream: bool
    include_usage: bool
    request_id: str


def parse_chat(body: dict[str, Any]) -> ParsedBody:
    """A body of /v1/chat/completions. Raises RequestError."""
    fields = Fields(body)
    messages = fields.required("messages", fields.array("messages"))
    if not messages:
        raise MissingFieldError("messages", "messages is empty: a conversation has at least one message")
    prompt = ChatPrompt([_message(message, f"messages[{number}]") for number, message in enumerate(messages)])
    limit_name, limit = _chat_limit(fields)
    fields.only("n", (1,), _ONE)
    fields.only("logprobs", (False,), _LATER)
    fields.only("top_logprobs", (0,), _LATER)
    fields.only("tools", ([],), _LATER)
    fields.only("tool_choice", ("none", "auto"), _LATER)
    fields.only("parallel_tool_calls", (True, False), _LATER)
    fields.only("response_format", ({"type": "text"},), "only text is produced")
    fields.only("modalities", (["text"],), "only text is produced")
    return _finish(fields, prompt, limit_name, limit)


def parse_completion(body: dict[str, Any]) -> ParsedBody:
    """A body of /v1/completions. Raises RequestError."""
    fields = Fields(body)
    prompt = _completion_prompt(fields.required("prompt", fields.raw("prompt")))
    limit = fields.integer("max_tokens")
    fields.only("n", (1,), _ONE)
    fields.only("best_of", (1,), _ONE)
    fields.only("logprobs", (), _LATER)
    fields.only("echo", (False,), _LATER)
    fields.only("suffix", ("",), _LATER)
    return _finish(fields, prompt, "max_tokens", DEFAULT_COMPLETION_TOKENS if limit is None else limit)


def _finish(fields: Fields, prompt: Prompt, limit_name: str, limit: int | None) -> ParsedBody:
    """What both kinds of body have in common; refuses what is left."""
    model = fields.required("model", fields.text("model"))
    sampling = _sampling(fields, limit_name, limit)
    stream = fields.boolean("stream") or False
    include_usage = _include_usage(fields, stream)
    request_id = fields.text("request_id") or ""
    for penalty in ("presence_penalty", "frequency_penalty"):
        fields.only(penalty, (0, 0.0), _LATER)
    fields.only("logit_bias", ({},), _LATER)
    for hint in HINTS:
        fields.raw(hint)
    fields.refuse_rest()
    return ParsedBody(model, prompt, sampling, stream, include_usage, request_id)


def _sampling(fields: Fields, limit_name: str, limit: int | None) -> SamplingOptions:
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
        names={"max_tokens": limit_name},
    )


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


def _completion_prompt(value: Any) -> Prompt:
    """Text, token ids, or a list of one of these."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise UnsupportedError("prompt", f"prompt has {len(value)} prompts, the limit is 1: send one request a prompt")
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value, "prompt")
    if isinstance(value, list) and all(is_integer(item) for item in value):
        return TokenPrompt(value, "prompt")
    raise WrongTypeError("prompt", f"prompt={shown(value)} must be a string or an array of token ids")


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongTypeError(path, f"{path}={shown(value)} must be an object with role and content")
    fields = Fields(value, path)
    role = fields.required("role", fields.text("role"))
    if role not in CHAT_ROLES:
        raise WrongTypeError(f"{path}.role", f"{path}.role={shown(role)} is none of {', '.join(CHAT_ROLES)}")
    message = {"role": role, "content": _content(fields.required("content", fields.raw("content")), f"{path}.content")}
    name = fields.text("name")
    if name is not None:
        message["name"] = name
    for absent in ("tool_calls", "annotations"):
        fields.only(absent, ([],), _LATER)
    for absent in ("refusal", "audio", "function_call", "tool_call_id"):
        fields.only(absent, (), _LATER)
    fields.refuse_rest()
    return message


def _content(value: Any, path: str) -> str:
    """Text, or parts of text, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise WrongTypeError(path, f"{path}={shown(value)} must be a string or an array of text parts")
    texts = []
    for number, part in enumerate(value):
        place = f"{path}[{number}]"
        if not isinstance(part, dict):
            raise WrongTypeError(place, f"{place}={shown(part)} must be an object with type and text")
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise UnsupportedError(f"{place}.type", f"{place}.type={shown(kind)} is not supported here: this model reads text only")
        if not isinstance(text, str):
            raise WrongTypeError(f"{place}.text", f"{place}.text={shown(text)} must be a string")
        texts.append(text)
    return "".join(texts)
