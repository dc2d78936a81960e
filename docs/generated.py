"""Pages of this folder that a program of it writes: `main` of each of them."""

from __future__ import annotations

import argparse
from pathlib import Path


def write_or_check(script: str, about: str, page: str) -> int:
    """`script` (its `__file__`) writes `page` into the .md file of its name; with --check it says whether that is there. The exit status."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the page is out of date")
    path = Path(script).with_suffix(".md")
    if not parser.parse_args().check:
        path.write_text(page)
        return 0
    if not path.exists() or path.read_text() != page:
        print(f"docs/{path.name} is out of date: run python docs/{Path(script).name} and commit it")
        return 1
    print(f"docs/{path.name} is up to date")
    return 0
