"""Which libucp: the one that is named, else the system's, else the wheel's. One per process: two builds of UCX crash each other."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from baton.kvtransfer import _native
from baton.kvtransfer.config import LIBRARY_VARIABLE
from baton.kvtransfer.errors import LibraryConflict, LibraryNotFound, LibraryTooOld

#: The oldest UCX on which the tests of dying peers pass.
OLDEST = (1, 18)

_SONAME = "libucp.so.0"
#: What names a library.
_NAMED_BY = f"ucx_library or {LIBRARY_VARIABLE}"
_UCX_FILE = re.compile(r"/libuc[pst]\b[^/]*\.so[^/]*$")
_loading = threading.Lock()

#: Read by libucs when it is loaded, and by nothing else: it must not take over the process's signal handlers, complain about variables that are
#: meant for another program, or write to standard output. What the user set stays.
_WHILE_LOADING = {"UCX_HANDLE_ERRORS": "none", "UCX_DEBUG_SIGNO": "0", "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_FILE": "stderr"}


@dataclass(frozen=True, slots=True)
class Library:
    path: str
    version: str


def load(explicit_path: str) -> Library:
    """Opens the library, or returns the one that is open already. Raises LibraryNotFound, LibraryTooOld, LibraryConflict."""
    with _loading:
        candidates = _candidates(explicit_path)
        tried: list[str] = []
        for origin, path in candidates:
            with _settings_while_loading():
                found, version, missing, problem = _native.load_library(path)
            if found:
                _require_recent(found, version, origin, missing)
                if explicit_path and not _same_file(found, explicit_path):
                    raise LibraryConflict(f"{found} is in use in this process already, so {explicit_path} ({_NAMED_BY}) cannot be used too")
                return Library(os.path.realpath(found), version)
            lacks = f"it is no libucp: it lacks {', '.join(missing[:3])} and others"
            tried.append(f"{path} ({origin}): {problem or lacks}")
        raise LibraryNotFound(
            f"no usable libucp: {'; '.join(tried)}. Install libucx-cu13 (or libucx-cu12, or the system's libucx0), "
            f"or set {LIBRARY_VARIABLE} to a libucp.so.0"
        )


def _require_recent(path: str, version: str, origin: str, missing: list[str]) -> None:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not missing and numbers >= OLDEST:
        return
    why = f"lacks {', '.join(missing)}" if missing else "ends the process when a tcp peer dies at the wrong moment (seen with 1.13 and 1.15)"
    wheel = wheel_library()
    remedy = f"set {LIBRARY_VARIABLE}={wheel}" if wheel else f"install libucx-cu13, or set {LIBRARY_VARIABLE} to a newer libucp.so.0"
    raise LibraryTooOld(f"{path} (UCX {version or 'of unknown version'}, {origin}) {why}; at least {OLDEST[0]}.{OLDEST[1]} is needed: {remedy}")


def wheel_library() -> Path | None:
    """The libucp of an installed libucx-cu13 or libucx-cu12 wheel."""
    spec = find_spec("libucx")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib" / _SONAME
        if path.is_file():
            return path
    return None


def _candidates(explicit_path: str) -> list[tuple[str, str]]:
    present = _already_loaded()
    if explicit_path:
        strangers = [path for path in present if "libucp" in path and not _same_file(path, explicit_path)]
        if strangers:
            raise LibraryConflict(f"{strangers[0]} is loaded in this process already, so {explicit_path} ({_NAMED_BY}) cannot be used too")
        return [(f"named by {_NAMED_BY}", explicit_path)]
    ours = [path for path in present if re.search(r"/libucp\.so[^/]*$", path)]
    if ours:
        return [("loaded by another package", ours[0])]
    if present:
        raise LibraryConflict(
            f"another package has loaded its own build of UCX ({present[0]}); two builds crash each other: keep it out of this process, "
            f"or set {LIBRARY_VARIABLE} to the libucp that belongs to it"
        )
    wheel = wheel_library()
    return [("the system's", _SONAME), *([("the wheel's", str(wheel))] if wheel else [])]


def _already_loaded() -> list[str]:
    """Files of any UCX build that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return sorted({line[line.index("/") :] for line in lines if "/" in line and _UCX_FILE.search(line)})


def _same_file(left: str, right: str) -> bool:
    try:
        return os.path.samefile(left, right)
    except OSError:
        return False


@contextmanager
def _settings_while_loading() -> Iterator[None]:
    added = {name: value for name, value in _WHILE_LOADING.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
