"""One engine and one build context for all tests that run containers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machine import Engine, NoEngineError, build_context, engine, survey


def pytest_report_header() -> list[str]:
    return survey()


@pytest.fixture(scope="session")
def here() -> Iterator[Engine]:
    try:
        with engine() as found:
            yield found
    except NoEngineError as error:
        pytest.skip(f"NO CONTAINER WAS BUILT OR RUN: {error}")


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_context(tmp_path_factory.mktemp("context"))
