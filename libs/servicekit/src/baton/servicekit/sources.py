"""Where settings come from: environment variables and command-line flags. Values stay text; pydantic gives them their types."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.servicekit.fields import Setting

#: For each setting that was given: (the variable or flag that gave it, the text it gave).
Origins = dict[tuple[str, ...], tuple[str, str]]

#: What Kubernetes writes into every container for each service of the namespace.
_SERVICE_LINK = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP)(_.+)?)$")


def read_environment(settings: Sequence[Setting], environ: Mapping[str, str], origins: Origins) -> dict[tuple[str, ...], Any]:
    """Values that the environment gives; the service's own variable wins over the shared one."""
    values: dict[tuple[str, ...], Any] = {}
    for setting in settings:
        for name in (setting.env, setting.shared_env):
            text = environ.get(name, "") if name else ""
            if name and text:
                values[setting.path] = _split(setting, text)
                origins[setting.path] = (name, text)
                break
    return values


def unknown_variables(settings: Sequence[Setting], environ: Mapping[str, str], prefix: str) -> list[str]:
    """One line for each variable that has the service's prefix but is no setting: a typo must not pass for a default."""
    known = {setting.env for setting in settings}
    lines = []
    for name in sorted(environ):
        if not name.startswith(prefix) or name in known or _SERVICE_LINK.match(name.removeprefix(prefix)):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {close[0]}?" if close else "; --help lists them"
        lines.append(f"{name} is not a setting{hint}")
    return lines


def read_flags(service: str, about: str, settings: Sequence[Setting], argv: Sequence[str], origins: Origins) -> dict[tuple[str, ...], Any]:
    """Values that the command line gives."""
    parser = argparse.ArgumentParser(
        prog=f"baton-{service}", description=about, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for setting in settings:
        _add_flag(parser, setting)
    given = vars(parser.parse_args(list(argv)))
    values: dict[tuple[str, ...], Any] = {}
    for setting in settings:
        raw = given[".".join(setting.path)]
        if raw is None:
            continue
        if isinstance(raw, list):
            raw = ",".join(raw)
        values[setting.path] = raw if isinstance(raw, bool) else _split(setting, raw)
        origins[setting.path] = (setting.flag, str(raw))
    return values


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    names = setting.env if setting.shared_env is None else f"{setting.env}, {setting.shared_env}"
    kind = f"{setting.type_name}, comma separated or one a flag" if setting.is_tuple else setting.type_name
    text = f"{setting.description} [{kind}; default: {setting.default_text}; {names}]".replace("%", "%%")
    dest = ".".join(setting.path)
    if setting.is_bool:
        parser.add_argument(setting.flag, dest=dest, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif setting.is_tuple:
        parser.add_argument(setting.flag, dest=dest, action="append", default=None, metavar="VALUE", help=text)
    else:
        parser.add_argument(setting.flag, dest=dest, default=None, metavar="VALUE", help=text)


def _split(setting: Setting, text: str) -> Any:
    if setting.is_tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text
