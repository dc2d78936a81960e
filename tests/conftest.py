"""The fleets that integration tests share. Each is started once a session, for all the files of one pytest run; every test asserts that nothing is
held when it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fleet import Fleet

#: Servers that say over HTTP what they count.
COUNTING = ("--metrics-exporter", "prometheus", "--metrics-port", "0")

#: SmolLM2's chat template has no place for tools.
GATEWAY = ("--tool-call-format", "hermes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one fleet run together, so that only one fleet is up at a time on a small machine."""
    items.sort(key=lambda item: next((name for name in ("shm_fleet", "tcp_fleet", "plain_fleet") if name in getattr(item, "fixturenames", ())), ""))


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real model's folder; fetched when it is not there yet."""
    fetch = [sys.executable, "-m", "baton.cli.main", "model", "fetch", "smollm2"]
    return Path(subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def _split(model_path: Path, folder: Path, transport: str) -> Iterator[Fleet]:
    fleet = Fleet(model_path, folder)
    fleet.prefill("--transport", transport, *COUNTING)
    fleet.decode("--transport", transport, "--digest", "all", *COUNTING)
    yield fleet.start(*GATEWAY)
    fleet.assert_free()
    fleet.close()


@pytest.fixture(scope="session")
def shm_fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One prefill and one decode server, shared memory, every digest compared."""
    yield from _split(model_path, tmp_path_factory.mktemp("shm"), "shm")


@pytest.fixture(scope="module")
def tcp_fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One prefill and one decode server, tcp, every digest compared."""
    yield from _split(model_path, tmp_path_factory.mktemp("tcp"), "tcp")


@pytest.fixture(scope="session")
def plain_fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One plain server behind a gateway."""
    fleet = Fleet(model_path, tmp_path_factory.mktemp("plain"))
    fleet.plain(*COUNTING)
    yield fleet.start(*GATEWAY)
    fleet.assert_free()
    fleet.close()
