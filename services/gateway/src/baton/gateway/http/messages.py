"""A chat's messages, as OpenAI has them, to those that chat templates take. Pure."""

from __future__ import annotations

from typing import Any

from baton.gateway.errors import UnsupportedError, WrongTypeError
from baton.gateway.http.fields import Fields, shown
from baton.gateway.http.tools import earlier_calls

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")

_LATER = "leave it out"


def message(value: Any, path: str) -> dict[str, Any]:
    """Raises RequestError."""
    if not isinstance(value, dict):
        raise WrongTypeError(path, f"{path}={shown(value)} must be an object with role and content")
    fields = Fields(value, path)
    role = fields.required("role", fields.text("role"))
    if role not in CHAT_ROLES:
        raise WrongTypeError(f"{path}.role", f"{path}.role={shown(role)} is none of {', '.join(CHAT_ROLES)}")
    made: dict[str, Any] = {"role": role, "content": ""}
    calls = fields.array("tool_calls") or []
    if calls and role == "assistant":
        made["tool_calls"] = earlier_calls(calls, f"{path}.tool_calls")
    elif calls:
        raise UnsupportedError(f"{path}.tool_calls", f"{path}.tool_calls is an assistant's, and role is {role}: leave it out")
    content = fields.raw("content")
    if content is not None or not calls:
        made["content"] = _content(fields.required("content", content), f"{path}.content")
    for more, of in (("name", ""), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        value = fields.text(more)
        if value is not None and of not in ("", role):
            raise UnsupportedError(f"{path}.{more}", f"{path}.{more} is of role {of}, and role is {role}: leave it out")
        if value is not None:
            made[more] = value
    fields.only("annotations", ([],), _LATER)
    for absent in ("refusal", "audio", "function_call"):
        fields.only(absent, (), _LATER)
    fields.refuse_rest()
    return made


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
