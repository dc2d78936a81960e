"""From pydantic fields to rows: what each setting is called and what it takes."""

from __future__ import annotations

import enum
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `path`: where it lives in the settings object. `env`: its variable; `shared_env`: one that rules every service, if any."""

    path: tuple[str, ...]
    env: str
    shared_env: str | None
    flag: str
    type_name: str
    default: Any
    required: bool
    description: str
    is_bool: bool = False
    is_tuple: bool = False
    secret: bool = False

    @property
    def default_text(self) -> str:
        """The default as documentation shows it."""
        if self.required:
            return "required"
        if self.default is None or self.default == "":
            return "not set"
        if isinstance(self.default, enum.Enum):
            return str(self.default.value)
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default)) or "none"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return str(self.default)


def describe(model: type[BaseModel], group_type: type[BaseModel], service: str) -> list[Setting]:
    """Rows of `model`: its own fields, and those of its groups (fields whose type is a `group_type`)."""
    rows: list[Setting] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, group_type):
            rows.extend(_group_rows(name, field, kind, service))
        else:
            rows.append(_row((name,), name, field, field.default, service, shared=False))
    return rows


def _group_rows(name: str, field: FieldInfo, group: Any, service: str) -> list[Setting]:
    defaults = field.get_default(call_default_factory=True)
    rows = []
    for inner_name, inner in group.model_fields.items():
        default = getattr(defaults, inner_name) if isinstance(defaults, BaseModel) else inner.default
        rows.append(_row((name, inner_name), group.prefix + inner_name, inner, default, service, shared=group.shared))
    return rows


def _row(path: tuple[str, ...], name: str, field: FieldInfo, default: Any, service: str, *, shared: bool) -> Setting:
    if not field.description:
        raise TypeError(f"setting {'.'.join(path)} of {service} has no description")
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    env = str(extra.get("env") or f"BATON_{service.upper()}_{name.upper()}")
    kind = _strip_optional(field.annotation)
    return Setting(
        path=path,
        env=env,
        shared_env=f"BATON_{name.upper()}" if shared and not extra.get("env") else None,
        flag="--" + name.replace("_", "-"),
        type_name=type_name(kind),
        default=default,
        required=field.is_required() and default is field.default,
        description=field.description,
        is_bool=kind is bool,
        is_tuple=get_origin(kind) is tuple,
        secret=kind is SecretStr,
    )


def _strip_optional(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        inner = [part for part in get_args(kind) if part is not type(None)]
        if len(inner) == 1:
            return inner[0]
    return kind


def type_name(kind: Any) -> str:
    """How documentation names a type: "integer", "a | b" for choices, "list of text"."""
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"list of {type_name(get_args(kind)[0])}"
    if get_origin(kind) is typing.Annotated:
        return type_name(get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " | ".join(str(member.value) for member in kind)
    names: dict[Any, str] = {int: "integer", float: "number", bool: "true | false", str: "text", Path: "path", SecretStr: "secret"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
