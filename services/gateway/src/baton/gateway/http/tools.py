"""Tools, the choice among them, and calls of earlier turns, as OpenAI has them, to the gateway's own. Pure."""

from __future__ import annotations

from typing import Any

from baton.gateway.errors import UnsupportedError, WrongTypeError
from baton.gateway.http.fields import Fields, shown
from baton.gateway.tools.offer import NO_PARAMETERS, Choice, Offer, Tool, earlier_call, offer

CHOICES = ("none", "auto", "required")


def offered(fields: Fields) -> Offer | None:
    """Takes `tools`, `tool_choice` and `parallel_tool_calls`. Raises RequestError."""
    tools = [_tool(value, f"tools[{number}]") for number, value in enumerate(fields.array("tools") or [])]
    choice, function = _choice(fields.raw("tool_choice"))
    parallel = fields.boolean("parallel_tool_calls")
    return offer(tools, choice, function, parallel=parallel is not False)


def earlier_calls(values: list[Any], path: str) -> list[dict[str, Any]]:
    """An assistant's message's calls, as chat templates take them: the arguments as an object."""
    return [_call(value, f"{path}[{number}]") for number, value in enumerate(values)]


def _object(value: Any, path: str) -> Fields:
    if not isinstance(value, dict):
        raise WrongTypeError(path, f"{path}={shown(value)} must be an object")
    return Fields(value, path)


def _function(fields: Fields, path: str) -> Fields:
    """The object beside type: "function"."""
    kind = fields.required("type", fields.text("type"))
    if kind != "function":
        raise UnsupportedError(f"{path}.type", f"{path}.type={shown(kind)} is not supported here: only functions are")
    return _object(fields.required("function", fields.raw("function")), f"{path}.function")


def _tool(value: Any, path: str) -> Tool:
    fields = _object(value, path)
    function = _function(fields, path)
    fields.refuse_rest()
    name = function.required("name", function.text("name"))
    description = function.text("description")
    parameters = function.mapping("parameters")
    function.boolean("strict")
    function.refuse_rest()
    return Tool(name, description, parameters or NO_PARAMETERS)


def _choice(value: Any) -> tuple[Choice, str]:
    if value is None:
        return "auto", ""
    if isinstance(value, dict):
        fields = Fields(value, "tool_choice")
        function = _function(fields, "tool_choice")
        fields.refuse_rest()
        name = function.required("name", function.text("name"))
        function.refuse_rest()
        return "named", name
    match value:
        case "none" | "auto" | "required":
            return value, ""
    raise WrongTypeError("tool_choice", f"tool_choice={shown(value)} is none of {', '.join(CHOICES)} and no named function")


def _call(value: Any, path: str) -> dict[str, Any]:
    fields = _object(value, path)
    function = _function(fields, path)
    call_id = fields.required("id", fields.text("id"))
    fields.raw("index")
    fields.refuse_rest()
    name = function.required("name", function.text("name"))
    text = function.required("arguments", function.text("arguments"))
    function.refuse_rest()
    return earlier_call(call_id, name, text, f"{path}.function.arguments")
