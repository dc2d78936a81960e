"""The HTTP front's own description, OpenAPI 3.1: paths, bodies with every limit, answers, errors. Pure; a test holds the front to it.

What a schema cannot say is said in words: prompt and answer together against the context, min_tokens against max_tokens, and two names of one limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.gateway.gate import MAX_PRIORITY
from baton.gateway.http.deadline import TIMEOUT_HEADER
from baton.gateway.http.openapi_parts import Schema, maybe, message, only, structures, tools
from baton.gateway.http.parse import DEFAULT_COMPLETION_TOKENS, HINTS
from baton.gateway.requests import MAX_REQUEST_ID_CHARS
from baton.gateway.sampling import (
    LEAST_TOP_P,
    MAX_ANSWERS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    REPETITION_PENALTY,
)

_JSON, _EVENTS = "application/json", "text/event-stream"
_ERROR = {"$ref": "#/components/schemas/Error"}

#: What may go wrong with a request for an answer, by status.
_PROBLEMS = {
    400: "The body cannot be read, or a field is missing, of a wrong type, out of its range or not supported; `param` names it.",
    401: "A key is asked for here, and there is none or one that is not known.",
    403: "This key may not do that.",
    404: "`model` is not served here.",
    408: "The body did not come in time; the connection is closed.",
    413: "The body has more bytes than the limit; the connection is closed.",
    429: "Too much is open already; `Retry-After` says when to come again.",
    500: "The gateway or a server failed.",
    503: "No server can take it now, or a server was lost; `Retry-After` says when to come again.",
    504: "The request's deadline, or the time that a room may spend in one state, has passed.",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What is true of this gateway now. context_tokens: 0 while no server has said it."""

    model: str
    vocab_size: int
    context_tokens: int
    max_body_bytes: int


def describe(limits: Limits, version: str) -> Schema:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": version,
            "summary": "OpenAI-compatible chat and completion over prefill and decode servers.",
            "description": f"Every field that changes an answer is taken or refused, never ignored; null counts as not given. A body has at most "
            f"{limits.max_body_bytes} bytes of UTF-8. Prompt and answer together have at most {limits.context_tokens} tokens. "
            f"{TIMEOUT_HEADER} is a client's deadline for its whole request.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/v1/chat/completions": {"post": _answering("chat", "Answers a conversation.", "ChatRequest", "ChatCompletion")},
            "/v1/completions": {"post": _answering("completions", "Continues a prompt.", "CompletionRequest", "Completion")},
            "/v1/models": {"get": _reading("models", "What is served.", "ModelList", (401, 403))},
            "/v1/models/{model}": {"get": _reading("model", "One model.", "Model", (401, 403, 404), [_model_parameter(limits)])},
            "/tokenize": {"post": _converting("tokenize", "The token ids of a prompt or of a chat.", "TokenizeRequest", "Tokens")},
            "/detokenize": {"post": _converting("detokenize", "The text of token ids.", "DetokenizeRequest", "Text")},
            "/health": {"get": _reading("health", "Whether this process lives.", "Health")},
            "/ready": {"get": _readiness()},
            "/openapi.json": {"get": _reading("openapi", "This document.", "Document")},
        },
        "components": {"schemas": _schemas(limits), "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


# --- paths ------------------------------------------------------------------------------------------------------------------------


def _answering(name: str, summary: str, body: str, answer: str) -> Schema:
    good = {
        "description": f"The answer: one {answer}, or with `stream` server-sent events of chunks, the last of which is `data: [DONE]`. A stream that "
        "fails after it has begun ends with an event that holds an Error.",
        "headers": {"x-request-id": {"description": "The request's id in logs and traces.", "schema": {"type": "string"}}},
        "content": {_JSON: {"schema": _ref(answer)}, _EVENTS: {}},
    }
    return {
        "operationId": name,
        "summary": summary,
        "parameters": [
            {
                "name": "x-request-id",
                "in": "header",
                "description": "As the body's `request_id`, which wins.",
                "schema": {"type": "string", "maxLength": MAX_REQUEST_ID_CHARS, "pattern": "^[ -~]*$"},
            }
        ],
        "requestBody": {"required": True, "content": {_JSON: {"schema": _ref(body)}}},
        "responses": {"200": good} | {str(status): _problem(text) for status, text in _PROBLEMS.items()},
    }


def _converting(name: str, summary: str, body: str, answer: str) -> Schema:
    described = _reading(name, summary, answer, (400, 401, 403, 404, 408, 413))
    return described | {"requestBody": {"required": True, "content": {_JSON: {"schema": _ref(body)}}}}


def _reading(name: str, summary: str, answer: str, problems: tuple[int, ...] = (), parameters: list[Schema] | None = None) -> Schema:
    responses = {"200": {"description": summary, "content": {_JSON: {"schema": _ref(answer)}}}}
    responses |= {str(status): _problem(_PROBLEMS[status]) for status in problems}
    return {"operationId": name, "summary": summary, "responses": responses} | ({"parameters": parameters} if parameters else {})


def _readiness() -> Schema:
    content = {_JSON: {"schema": _ref("Readiness")}}
    return {
        "operationId": "ready",
        "summary": "Whether a request sent now would be taken; if not, why, for whoever may know.",
        "responses": {"200": {"description": "It would.", "content": content}, "503": {"description": "It would not.", "content": content}},
    }


def _model_parameter(limits: Limits) -> Schema:
    return {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}, "example": limits.model}


def _problem(text: str) -> Schema:
    return {"description": text, "content": {_JSON: {"schema": _ERROR}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# --- bodies that are sent ---------------------------------------------------------------------------------------------------------


def _schemas(limits: Limits) -> Schema:
    return {
        "ChatRequest": _chat_request(limits),
        "CompletionRequest": _completion_request(limits),
        "TokenizeRequest": _tokenize_request(limits),
        "DetokenizeRequest": {
            "type": "object",
            "required": ["model", "tokens"],
            "properties": {"model": {"type": "string", "const": limits.model}, "tokens": {"type": "array", "items": _token(limits)}},
            "additionalProperties": False,
        },
        "Message": message(),
        **_answers(),
    }


def _tokenize_request(limits: Limits) -> Schema:
    common: Schema = {
        "model": {"type": "string", "const": limits.model},
        "add_special_tokens": only(True),
        "add_generation_prompt": only(True),
    }
    kinds: tuple[Schema, Schema] = (
        {"prompt": {"type": "string"}},
        {"messages": {"type": "array", "minItems": 1, "items": _ref("Message")}},
    )
    one_of = [{"type": "object", "required": ["model", *kind], "properties": common | kind, "additionalProperties": False} for kind in kinds]
    return {"anyOf": one_of}


def _chat_request(limits: Limits) -> Schema:
    own = {
        "messages": {"type": "array", "minItems": 1, "items": _ref("Message")},
        "max_completion_tokens": _answer_limit(limits, "OpenAI's newer name of max_tokens; if both are given they must be equal."),
        "max_tokens": _answer_limit(limits, "Default: what is left of the context."),
        "logprobs": maybe("boolean", description="Log probabilities of the answer's tokens, a stop token's included; as the model gives them."),
        "top_logprobs": maybe("integer", minimum=0, maximum=MAX_TOP_LOGPROBS, description="Only with logprobs: true. Default 0."),
        **tools(),
        "modalities": only(["text"]),
    } | structures()
    return _request(own, "messages", limits)


def _completion_request(limits: Limits) -> Schema:
    token_ids = {"type": "array", "minItems": 1, "items": _token(limits)}
    text = {"type": "string", "minLength": 1}
    own = {
        "prompt": {
            "description": "Text, token ids, or a list of one of these: choice number i * n + k is then answer number k to prompt number i.",
            "anyOf": [text, token_ids, *({"type": "array", "minItems": 1, "maxItems": MAX_ANSWERS, "items": one} for one in (text, token_ids))],
        },
        "max_tokens": _answer_limit(limits, f"Default: {DEFAULT_COMPLETION_TOKENS}. 0 goes with echo: the prompt alone.") | {"minimum": 0},
        "best_of": only(1),
        "logprobs": maybe("integer", minimum=0, maximum=MAX_TOP_LOGPROBS, description="With each token the log probabilities of so many others."),
        "echo": maybe("boolean", description="The prompt's text before the answer's; with logprobs, its tokens' as well."),
        "suffix": only(""),
    } | structures()
    return _request(own, "prompt", limits)


def _request(own: Schema, prompt: str, limits: Limits) -> Schema:
    properties = {"model": {"type": "string", "const": limits.model}} | own | _sampling(limits) | _common()
    return {
        "type": "object",
        "required": ["model", prompt],
        "properties": properties,
        "additionalProperties": False,
        "if": {"required": ["stream_options"], "properties": {"stream_options": {"type": "object"}}},
        "then": {"required": ["stream"], "properties": {"stream": {"const": True}}},
    }


def _sampling(limits: Limits) -> Schema:
    stop_string = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    return {
        "temperature": maybe("number", minimum=0, maximum=2, description="0 is greedy. Default 1."),
        "top_p": maybe("number", exclusiveMinimum=LEAST_TOP_P, maximum=1, description="Default 1. The least one is above 0 as a 32-bit number."),
        "top_k": maybe("integer", minimum=0, maximum=limits.vocab_size, description="Default 0: off."),
        "min_p": maybe("number", minimum=0, maximum=1, description="Default 0: off."),
        "seed": maybe("integer", minimum=-(2**63), maximum=2**64 - 1, description="Drawn when it is not given. Equal seeds, equal answers."),
        "prompt_logprobs": maybe("integer", minimum=0, maximum=MAX_TOP_LOGPROBS, description="Of the prompt's tokens. Only with stream: false."),
        "n": maybe("integer", minimum=1, maximum=MAX_CHOICES, description="At most --max-rooms and the API key's max_concurrent. Default 1."),
        "min_tokens": maybe("integer", minimum=0, description="At most max_tokens. Default 0."),
        "stop": {"anyOf": [stop_string, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": stop_string}, {"type": "null"}]},
        "stop_token_ids": maybe("array", maxItems=MAX_STOP_TOKEN_IDS, items=_token(limits)),
        "ignore_eos": maybe("boolean", description="Go on past the end-of-sequence token."),
        "repetition_penalty": maybe(
            "number", minimum=REPETITION_PENALTY[0], maximum=REPETITION_PENALTY[1], description="Of tokens in prompt and answer. Default 1: off."
        ),
        "presence_penalty": maybe("number", minimum=-2, maximum=2, description="Of tokens in the answer so far. Default 0: off."),
        "frequency_penalty": maybe("number", minimum=-2, maximum=2, description="The same, for each time. Default 0: off."),
        "logit_bias": maybe(
            "object",
            maxProperties=MAX_BIASED_TOKENS,
            propertyNames={"pattern": "^(0|[1-9][0-9]{0,9})$"},
            additionalProperties={"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            description="By token id, what is added to its logit, after the penalties and before temperature.",
        ),
    }


def _common() -> Schema:
    options = {"include_usage": maybe("boolean"), "include_obfuscation": only(False)}
    fields: Schema = {
        "stream": maybe("boolean", description="Answer with server-sent events."),
        "stream_options": maybe("object", properties=options, additionalProperties=False, description="Only with stream: true."),
        "priority": maybe("integer", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY, description="Lower is sooner, by a second each. Default 0."),
        "request_id": maybe("string", maxLength=MAX_REQUEST_ID_CHARS, pattern="^[ -~]*$", description="For logs and traces."),
    }
    return fields | {hint: {"description": "A hint; no answer depends on it."} for hint in HINTS}


def _answer_limit(limits: Limits, description: str) -> Schema:
    text = f"{description} Together with the prompt at most {limits.context_tokens} tokens."
    return maybe("integer", minimum=1, maximum=max(1, limits.context_tokens - 1), description=text)


def _token(limits: Limits) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}


# --- bodies that come back --------------------------------------------------------------------------------------------------------


def _answers() -> Schema:
    finish = {"type": ["string", "null"], "enum": ["stop", "length", "tool_calls", None]}
    count = {"type": "integer", "minimum": 0}
    text = {"type": "string"}
    called = _object(id=text, type={"const": "function"}, function=_object(name=text, arguments=text))
    said = _object(role={"const": "assistant"}, content={"type": ["string", "null"]}, refusal={"type": "null"})
    said["properties"] |= {"reasoning_content": text, "tool_calls": {"type": "array", "minItems": 1, "items": called}}
    head: Schema = {"id": text, "created": count, "model": text, "usage": _ref("Usage")}
    index: Schema = {"index": {"type": "integer", "minimum": 0, "maximum": MAX_ANSWERS - 1}, "finish_reason": finish}
    number = {"type": "number"}
    numbers = {"type": "array", "items": _or_null(number), "description": "Null for an echoed prompt's first token."}
    entry: Schema = {"token": text, "logprob": number, "bytes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}}}
    of_token = _object(**entry, top_logprobs={"type": "array", "items": _object(**entry)})
    of_chat = _object(content={"type": "array", "items": of_token}, refusal={"type": "null"})
    top = {"type": "array", "items": _or_null({"type": "object", "additionalProperties": number})}
    of_completion = _object(tokens={"type": "array", "items": text}, token_logprobs=numbers, top_logprobs=top, text_offset=numbers)
    of_prompt = {
        "type": "array",
        "items": _or_null({"type": "object", "additionalProperties": _object(logprob=number, rank=count, decoded_token=text)}),
    }
    return {
        "ChatCompletion": _and_maybe(
            _object(object={"const": "chat.completion"}, choices=_choices(_object(message=said, logprobs=_or_null(of_chat), **index)), **head),
            prompt_logprobs=of_prompt,
        ),
        "Completion": _object(
            object={"const": "text_completion"},
            choices=_choices(_and_maybe(_object(text=text, logprobs=_or_null(of_completion), **index), prompt_logprobs=of_prompt)),
            **head,
        ),
        "Usage": _object(prompt_tokens=count, completion_tokens=count, total_tokens=count, prompt_tokens_details=_object(cached_tokens=count)),
        "ModelList": _object(object={"const": "list"}, data={"type": "array", "items": _ref("Model")}),
        "Model": _object(id=text, object={"const": "model"}, created=count, owned_by=text, max_model_len=count),
        "Tokens": _object(count=count, max_model_len=count, tokens={"type": "array", "items": count}),
        "Text": _object(prompt=text),
        "Health": _object(status={"const": "ok"}),
        "Readiness": {"type": "object", "required": ["ready", "draining"], "properties": _readiness_fields(count)},
        "Document": {"type": "object", "required": ["openapi", "info", "paths"]},
        "Error": _object(error=_error()),
    }


def _readiness_fields(count: Schema) -> Schema:
    flag = {"type": "boolean"}
    problems = {"type": "array", "items": {"type": "string"}, "description": "Why servers that are known cannot be used now."}
    servers = {"type": "object", "description": "By role: how many servers are known, connected, and of use for a new request."}
    paths = {"type": "array", "items": {"type": "object"}, "description": "Pairs that are connected, with the transport between them."}
    return {"ready": flag, "draining": flag, "routes": count, "servers": servers, "problems": problems, "paths": paths, "rooms": count}


def _error() -> Schema:
    """Of a room that failed also who ended it, and where."""
    text = {"type": "string"}
    always = {
        "message": text,
        "type": {"enum": ["invalid_request_error", "rate_limit_error", "authentication_error", "permission_error", "server_error"]},
        "param": {"type": ["string", "null"], "description": "The field at fault."},
        "code": text | {"description": "The cause, one word."},
    }
    of_a_room = {
        "origin": {"enum": ["client", "gateway", "prefill", "decode", "transfer"]},
        "stage": {"enum": ["BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS", "FAILED"]},
        "elapsed_ms": {"type": "integer"},
        "allowed_ms": {"type": "integer"},
    }
    return {"type": "object", "required": list(always), "properties": always | of_a_room, "additionalProperties": False}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties, "additionalProperties": False}


def _and_maybe(schema: Schema, **properties: Schema) -> Schema:
    """Fields that are there only where they were asked for."""
    return schema | {"properties": schema["properties"] | properties}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _choices(item: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "maxItems": MAX_ANSWERS, "items": item}
