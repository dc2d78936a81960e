"""What a client offers: functions, and which of them must be called. Checked; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from baton.gateway import structured
from baton.gateway.errors import OutOfRangeError, RequestError, WrongTypeError
from baton.gateway.structured import Structure

MAX_TOOLS = 128
NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

Choice = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """parameters: JSON schema of the arguments, an object's. description: None where there is none."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]

    def told(self) -> dict[str, Any]:
        """As chat templates take it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class Offer:
    """tools: not empty. choice: "named": `function` must be called. parallel: more than one call may be made. field: for messages."""

    tools: tuple[Tool, ...]
    choice: Choice = "auto"
    function: str = ""
    parallel: bool = True
    field: str = "tools"

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The functions of which calls are taken."""
        return tuple(tool for tool in self.tools if self.choice != "named" or tool.name == self.function)

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")


def offer(
    tools: Sequence[Tool], choice: Choice, function: str, *, parallel: bool, of_tools: str = "tools", of_choice: str = "tool_choice"
) -> Offer | None:
    """None: nothing is offered, or nothing may be called. of_tools, of_choice: what the front calls the fields. Raises RequestError."""
    if len(tools) > MAX_TOOLS:
        raise OutOfRangeError(of_tools, f"{len(tools)} tools", f"[0, {MAX_TOOLS}] tools", "offer fewer")
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        if not re.fullmatch(NAME_PATTERN, tool.name, re.ASCII):
            path = f"{of_tools}[{number}].name"
            raise WrongTypeError(path, f"{path}={tool.name[:80]!r} must be 1 to 64 of a-z, A-Z, 0-9, _ and -")
        if tool.name in seen:
            raise RequestError(f"{of_tools}[{number}].name", f"{of_tools}[{number}].name={tool.name!r} is there twice: give each its own")
        seen.add(tool.name)
    if choice in ("required", "named") and not tools:
        raise RequestError(of_choice, f"{of_choice} asks for a call, and {of_tools} is empty: offer one, or leave it out")
    if choice == "named" and function not in seen:
        raise RequestError(of_choice, f"{of_choice} names {function[:80]!r}, which is none of {of_tools}: {', '.join(sorted(seen))}")
    return Offer(tuple(tools), choice, function, parallel, of_tools) if tools and choice != "none" else None


def earlier_call(call_id: str, name: str, arguments: str, path: str) -> dict[str, Any]:
    """A call of an earlier turn, as chat templates take it. arguments: JSON text of an object; empty: of none. Raises RequestError."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json_object(arguments, path)}}


def json_object(text: str, path: str) -> dict[str, Any]:
    """Raises RequestError."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(path, f"{path}={text[:60]!r} must be a JSON object's text")
    return value


def forced_structure(given: Offer | None, structure: Structure | None, of_choice: str) -> Structure | None:
    """What the answer is held to. A call that must be made is one in form and arguments: `structure` says so then. Raises RequestError."""
    if given is None:
        return structure
    if structure is not None:
        text = f"{structure.field} and {given.field} both say what the answer may be: send one, or {of_choice} none"
        raise RequestError(structure.field, text)
    if not given.is_forced:
        return None
    return structured.lark(_grammar(given), of_choice)


def _grammar(given: Offer) -> str:
    """A named function's arguments alone; else an array of calls as `CallScanner` takes them apart. Each schema is a root, for its $refs."""
    schemas = [json.dumps(_closed(tool.parameters)) for tool in given.callable]
    rules = [f"a{number}: %json {schema}" for number, schema in enumerate(schemas)]
    if given.choice == "named":
        return "\n".join(["start: a0", *rules])
    heads = [_text('{"name": ' + json.dumps(tool.name) + ', "arguments": ') for tool in given.callable]
    calls = [f'c{number}: {head} a{number} "}}"' for number, head in enumerate(heads)]
    several = ' (", " call)*' if given.parallel else ""
    start = f'start: "[" call{several} "]"'
    return "\n".join([start, "call: " + " | ".join(f"c{number}" for number in range(len(calls))), *calls, *rules])


def _text(text: str) -> str:
    return json.dumps(text)


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that the schema does not name are not made up, unless it says that there may be some."""
    options = {"whitespace_pattern": structured.WHITESPACE}
    return {"type": "object", "additionalProperties": False, "x-guidance": options} | dict(parameters)
