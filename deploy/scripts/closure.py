"""What a service installs, read from its requirements file and the rooms' own pyproject.toml: the one place where a closure is written down.

    python closure.py third-party requirements/decode.txt     # what comes from a package index, one requirement a line
    python closure.py rooms requirements/decode.txt           # folders of this checkout, one a line
    python closure.py libs requirements/decode.txt            # those of them that no service is

A Dockerfile installs them apart: what comes from an index changes seldom and is most of an image, so that a new version of Baton is a small
layer. Fails when a room needs another room that the requirements file does not list. Only the standard library is used.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: "-e ./libs/kvtransfer[cu13]  # comment"
_ROOM = re.compile(r"^-e\s+\./(?P<folder>[^\s\[#]+)(\[(?P<extras>[^\]]*)\])?")
_NAME = re.compile(r"^[A-Za-z0-9._-]+")


class ClosureError(Exception):
    """A requirements file, or a room's pyproject.toml, that does not add up."""


def rooms(requirements: Path) -> dict[str, tuple[str, ...]]:
    """Folder below the root -> extras asked for, in the file's order. `-r other.txt` is followed."""
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(requirements.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("-r "):
            found |= rooms(requirements.parent / text.removeprefix("-r ").strip())
            continue
        match = _ROOM.match(text)
        if match is None:
            raise ClosureError(f"{requirements.name} line {number}: {text!r} is not a room of this checkout (-e ./folder)")
        extras = tuple(extra.strip() for extra in (match["extras"] or "").split(",") if extra.strip())
        found[match["folder"]] = extras
    return found


def third_party(listed: dict[str, tuple[str, ...]]) -> list[str]:
    """Requirements of the rooms, extras included, that are no rooms themselves; sorted, each once. Raises ClosureError."""
    projects = {folder: _project(folder) for folder in listed}
    names = {_normal(project["name"]) for project in projects.values()}
    needed: set[str] = set()
    for folder, project in projects.items():
        asked = list(project.get("dependencies", []))
        for extra in listed[folder]:
            known = project.get("optional-dependencies", {})
            if extra not in known:
                raise ClosureError(f"{folder} has no extra {extra!r}; it has {', '.join(sorted(known)) or 'none'}")
            asked += known[extra]
        for requirement in asked:
            match = _NAME.match(requirement)
            name = _normal(match[0]) if match else requirement
            if name in names:
                continue
            if name.startswith("baton-"):
                raise ClosureError(f"{folder} needs {name}, which the requirements file does not list")
            needed.add(requirement)
    return sorted(needed)


def folders(listed: dict[str, tuple[str, ...]], kind: str) -> list[str]:
    return [f"./{folder}" for folder in listed if kind == "rooms" or not folder.startswith("services/")]


def _project(folder: str) -> dict[str, Any]:
    path = ROOT / folder / "pyproject.toml"
    if not path.is_file():
        raise ClosureError(f"{folder} has no pyproject.toml")
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in ("third-party", "rooms", "libs"):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        listed = rooms(Path(argv[1]))
        lines = third_party(listed) if argv[0] == "third-party" else folders(listed, argv[0])
    except (ClosureError, OSError) as error:
        sys.stderr.write(f"closure: {error}\n")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
