"""`response_format`, as OpenAI has it, and `structured_outputs`, as vLLM has it: what an answer must look like. Pure."""

from __future__ import annotations

from typing import Any

from baton.gateway import structured
from baton.gateway.errors import RequestError, WrongTypeError
from baton.gateway.http.fields import Fields, shown
from baton.gateway.structured import Structure

#: Of `structured_outputs`; exactly one of them is given.
KINDS = ("json", "regex", "choice", "grammar", "json_object")


def response_structure(fields: Fields) -> Structure | None:
    """Takes both fields; at most one may ask for something. Raises RequestError."""
    by_format = _response_format(fields.mapping("response_format"))
    by_kind = _structured_outputs(fields.mapping("structured_outputs"))
    if by_format is not None and by_kind is not None:
        raise RequestError("structured_outputs", f"structured_outputs and {by_format.field} both say what the answer must look like: send one")
    return by_format or by_kind


def _response_format(given: dict[str, Any] | None) -> Structure | None:
    if given is None:
        return None
    fields = Fields(given, "response_format")
    kind = fields.required("type", fields.text("type"))
    structure = None
    match kind:
        case "text":
            pass
        case "json_object":
            structure = structured.json_object("response_format")
        case "json_schema":
            structure = _json_schema(Fields(fields.required("json_schema", fields.mapping("json_schema")), "response_format.json_schema"))
        case _:
            raise WrongTypeError("response_format.type", f"response_format.type={shown(kind)} is none of text, json_object, json_schema")
    fields.refuse_rest()
    return structure


def _json_schema(fields: Fields) -> Structure:
    """Its name and description are for people; every schema is kept to the letter, strict or not."""
    fields.required("name", fields.text("name"))
    fields.text("description")
    fields.boolean("strict")
    schema = fields.required("schema", fields.mapping("schema"))
    fields.refuse_rest()
    return structured.json_schema(schema, "response_format.json_schema.schema")


def _structured_outputs(given: dict[str, Any] | None) -> Structure | None:
    if given is None:
        return None
    fields = Fields(given, "structured_outputs")
    asked = [kind for kind in KINDS if fields.has(kind)]
    if len(asked) != 1:
        text = f"structured_outputs has {' and '.join(asked) or 'nothing'} set; exactly one of {', '.join(KINDS)} must be"
        raise RequestError("structured_outputs", text)
    path = f"structured_outputs.{asked[0]}"
    structure: Structure | None
    match asked[0]:
        case "json":
            schema = fields.raw("json")
            if not isinstance(schema, dict | str):
                raise WrongTypeError(path, f"{path}={shown(schema)} must be a JSON schema, an object or its text")
            structure = structured.json_schema(schema, path)
        case "regex":
            structure = structured.regex(fields.text("regex") or "", path)
        case "grammar":
            structure = structured.lark(fields.text("grammar") or "", path)
        case "choice":
            structure = structured.choice(_texts(fields.array("choice") or [], path), path)
        case _:
            structure = structured.json_object(path) if fields.boolean("json_object") else None
    fields.refuse_rest()
    return structure


def _texts(values: list[Any], path: str) -> list[str]:
    for number, value in enumerate(values):
        if not isinstance(value, str):
            raise WrongTypeError(f"{path}[{number}]", f"{path}[{number}]={shown(value)} must be a string")
    return values
