"""docs/faults-covered.md: every kind of fault has a row, every row has tests, and those exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults-covered.md"
NUM_FAULTS = 24

ROWS = {
    cells[0].strip(): re.findall(r"`([^`]+)`", cells[2])
    for cells in (line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| F"))
}


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_fault_has_a_row() -> None:
    assert list(ROWS) == [f"F{number}" for number in range(1, NUM_FAULTS + 1)]


@pytest.mark.parametrize("fault", ROWS)
def test_the_tests_of_a_row_exist(fault: str) -> None:
    assert ROWS[fault], "no test is named"
    for named in ROWS[fault]:
        path, _, name = named.partition("::")
        assert name.startswith("test_"), named
        assert name in functions_of(ROOT / path), f"{named} is gone: name the test that holds the fault back now"
