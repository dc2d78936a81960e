"""Parts of the front's description: a chat's messages, tools, and what an answer must look like. Pure."""

from __future__ import annotations

from typing import Any

from baton.gateway.http.messages import CHAT_ROLES
from baton.gateway.structured import MAX_GRAMMAR_BYTES, MAX_TEXTS
from baton.gateway.tools.offer import MAX_TOOLS, NAME_PATTERN

Schema = dict[str, Any]


def tools() -> Schema:
    name = {"type": "string", "pattern": NAME_PATTERN}
    schema = {"type": ["object", "null"], "description": "A JSON schema of the arguments, an object's."}
    function = {"name": name, "description": maybe("string"), "parameters": schema, "strict": maybe("boolean")}
    tool = function_object(function, ["name"], {})
    named = function_object({"name": name}, ["name"], {})
    return {
        "tools": maybe("array", maxItems=MAX_TOOLS, items=tool, description="Functions that the model may call; no two of one name."),
        "tool_choice": {
            "description": "auto: the model decides; none: as without tools; required, a function: calls and no text, their arguments as its schema "
            "has them. The last two need tools, and do not go with response_format or structured_outputs.",
            "anyOf": [{"enum": ["none", "auto", "required", None]}, named],
        },
        "parallel_tool_calls": maybe("boolean", description="false: at most one call."),
    }


def function_object(properties: Schema, required: list[str], beside: Schema) -> Schema:
    inner = {"type": "object", "required": required, "properties": properties, "additionalProperties": False}
    whole: Schema = {"type": {"const": "function"}, "function": inner} | beside
    return {"type": "object", "required": [name for name in whole if name != "index"], "properties": whole, "additionalProperties": False}


def structures() -> Schema:
    """Schemas and grammars are data here: what cannot be compiled is refused in the library's own words."""
    schema = {"type": "object", "description": "A JSON schema. A keyword that is not understood is refused."}
    named = {"name": {"type": "string"}, "description": maybe("string"), "strict": maybe("boolean"), "schema": schema}
    formats = [
        {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}, "additionalProperties": False},
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"type": "object", "required": ["name", "schema"], "properties": named, "additionalProperties": False},
            },
            "additionalProperties": False,
        },
    ]
    text = {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}
    kinds: Schema = {
        "json": {"anyOf": [schema, text]},
        "regex": text | {"description": "Matched by the whole answer; Rust's syntax."},
        "choice": {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": text},
        "grammar": text | {"description": "Lark's syntax, as llguidance reads it; begins with `start`."},
        "json_object": {"type": "boolean"},
    }
    one_of = [{"type": "object", "required": [name], "properties": {name: kind}, "additionalProperties": False} for name, kind in kinds.items()]
    words = "What the answer must look like; not with min_tokens or ignore_eos. At most one of both. max_tokens, stop, stop_token_ids may cut it."
    return {
        "response_format": {"description": words, "default": None, "anyOf": [{"type": "null"}, *formats]},
        "structured_outputs": {"description": words, "default": None, "anyOf": [{"type": "null"}, *one_of]},
    }


def message() -> Schema:
    part = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
    properties = {
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": part, "description": "Parts of text, which are joined."}]},
        "name": maybe("string"),
        "annotations": empty("array"),
    } | {absent: only() for absent in ("refusal", "audio", "function_call")}
    call = function_object(
        {"name": {"type": "string"}, "arguments": {"type": "string"}}, ["name", "arguments"], {"id": {"type": "string"}, "index": {}}
    )
    calls = {"type": "array", "minItems": 1, "items": call, "description": "The arguments are a JSON object's text."}
    thought = {"reasoning_content": maybe("string", description="What was thought before.")}
    no_calls = {"tool_calls": empty("array")}
    content: Schema = {"anyOf": [properties["content"], {"type": "null"}]}
    kinds: list[tuple[Schema, Schema, str]] = [
        ({"enum": [role for role in CHAT_ROLES if role not in ("assistant", "tool")]}, no_calls, "content"),
        ({"const": "assistant"}, no_calls | thought, "content"),
        ({"const": "assistant"}, {"content": content, "tool_calls": calls} | thought, "tool_calls"),
        ({"const": "tool"}, no_calls | {"tool_call_id": maybe("string", description="Which call it answers.")}, "content"),
    ]
    return {
        "anyOf": [
            {"type": "object", "required": ["role", needed], "properties": properties | more | {"role": role}, "additionalProperties": False}
            for role, more, needed in kinds
        ]
    }


def maybe(kind: str, **more: Any) -> Schema:
    return {"type": [kind, "null"]} | more


def only(*values: Any) -> Schema:
    """A feature of other servers: only its idle values are taken."""
    return {"enum": [*values, None]}


def empty(kind: str) -> Schema:
    return maybe(kind, **{"maxItems" if kind == "array" else "maxProperties": 0})
