"""How models of the families that are served write calls, and how they are told of tools where their chat template says nothing. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.tools.offer import Tool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """begin: stands before a call, or before all of them; end: behind each; empty: nothing does. bare: a call may also be the whole answer, from its
    first character on."""

    name: str
    begin: str
    end: str = ""
    bare: bool = False


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = CallFormat("llama3", "<|python_tag|>", bare=True)
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]")
FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL)}


def format_of(template: str | None) -> CallFormat | None:
    """What a chat template says of itself; None: it knows no calls, or writes them in a way that is not known here."""
    if template is None:
        return None
    if MISTRAL.begin in template:
        return MISTRAL
    if HERMES.begin in template:
        return HERMES
    # Llama's own templates ask for {"name": ..., "parameters": ...} in words.
    return LLAMA3 if LLAMA3.begin in template or ('"parameters"' in template and "ipython" in template) else None


def instruction(form: CallFormat, tools: Sequence[Tool]) -> str:
    """A system message that tells of the tools."""
    told = "\n".join(json.dumps(tool.told(), ensure_ascii=False) for tool in tools)
    example = f'{form.begin}{{"name": "a function\'s name", "arguments": {{an object}}}}{form.end}'
    return f"You may call these functions, each described by a JSON schema:\n{told}\nTo call one, answer with nothing but:\n{example}"


def written(form: CallFormat, message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message whose calls are part of its text."""
    calls = [
        f"{form.begin}{json.dumps({'name': call['function']['name'], 'arguments': call['function']['arguments']}, ensure_ascii=False)}{form.end}"
        for call in message.get("tool_calls", ())
    ]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return kept | {"content": "\n".join([*([message["content"]] if message["content"] else []), *calls])}
