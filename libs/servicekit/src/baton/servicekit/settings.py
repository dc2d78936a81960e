"""Typed, frozen settings: command-line flags over environment variables over defaults, all three made from the same fields.

A service composes groups and never inherits them:

    class DecodeSettings(ServiceSettings):
        service: ClassVar[str] = "decode"
        listen: ListenSettings = ListenSettings(port=50062)
        log: LogSettings = LogSettings()
        model_path: Path = Field(description="Folder of the model.")

    settings = DecodeSettings.load(sys.argv[1:], os.environ)

A field `f` has the variable BATON_<SERVICE>_<F> and the flag --f; a field of a group has its group's prefix before its name. A shared
group (logs, TLS) is also read from BATON_<PREFIX>_<F>, so that one variable can rule all services; the service's own variable wins.
An empty variable counts as not set. Tuples are comma separated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from baton.servicekit.errors import SettingsError
from baton.servicekit.fields import Setting, describe
from baton.servicekit.sources import Origins, read_environment, read_flags, unknown_variables

_CONFIG = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


class SettingsGroup(BaseModel):
    """Settings that several services share. `prefix` stands before each field's name in flags and variables ("log_"); `shared`: see above."""

    model_config = _CONFIG
    prefix: ClassVar[str] = ""
    shared: ClassVar[bool] = False


class ServiceSettings(BaseModel):
    """All settings of one service. Set `service` to its name; only the service's config.py calls `load`."""

    model_config = _CONFIG
    service: ClassVar[str]

    @classmethod
    def load(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Self:
        """The settings that `argv` (without the program's name) and `environ` ask for.

        Raises SettingsError that names every bad variable or flag with its value. `--help` prints all settings and exits with 0; an
        unknown flag exits with 2.
        """
        settings = cls.describe()
        origins: Origins = {}
        values = {setting.path: setting.default for setting in settings if not setting.required}
        values |= read_environment(settings, environ, origins)
        values |= read_flags(cls.service, cls.__doc__ or "", settings, argv, origins)
        problems = unknown_variables(settings, environ, f"BATON_{cls.service.upper()}_")
        try:
            loaded = cls.model_validate(_nest(values))
        except ValidationError as error:
            raise SettingsError("\n".join([*problems, *_explain(error, settings, origins)])) from None
        if problems:
            raise SettingsError("\n".join(problems))
        return loaded

    @classmethod
    def describe(cls) -> list[Setting]:
        """Every setting of this service, in the order of the fields: the rows of docs/environment.md and of --help."""
        return describe(cls, SettingsGroup, cls.service)


def _nest(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        if len(path) == 1:
            nested[path[0]] = value
        else:
            nested.setdefault(path[0], {})[path[1]] = value
    return nested


def _explain(error: ValidationError, settings: Sequence[Setting], origins: Origins) -> list[str]:
    by_path = {setting.path: setting for setting in settings}
    lines = []
    for item in error.errors(include_url=False):
        place = tuple(str(part) for part in item["loc"])
        setting = by_path.get(place[:1]) or by_path.get(place[:2])
        if setting is None:  # a rule about several settings at once names them itself
            lines.append(_reason(item))
        elif item["type"] == "missing":
            lines.append(f"{setting.flag} (or {setting.env}) is required: {setting.description}")
        else:
            lines.append(_bad_value(setting, origins.get(setting.path), _reason(item)))
    return lines


def _reason(item: ErrorDetails) -> str:
    """Our own words where the rule is ours: pydantic would put "Value error, " before them."""
    return str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]


def _bad_value(setting: Setting, origin: tuple[str, str] | None, message: str) -> str:
    name, value = origin or (setting.env, str(setting.default))
    shown = "(hidden)" if setting.secret else repr(value)
    message = message.removeprefix(f"{setting.flag}=")  # a rule that names its flag, which stands here already
    hint = ""
    if value.startswith("tcp://") and name.endswith("_PORT"):
        hint = " (Kubernetes wrote this variable for a service of the same name: set enableServiceLinks: false in the pod)"
    return f"{name}={shown}: {message}{hint}. What it sets: {setting.description}"
