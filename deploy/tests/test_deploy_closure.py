"""Closures: what a service's image installs is what its rooms ask for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from machine import ROOT

sys.path.insert(0, str(ROOT / "deploy" / "scripts"))

from closure import ClosureError, folders, rooms, third_party


def names(requirements: list[str]) -> set[str]:
    return {requirement.split(">")[0].split("=")[0] for requirement in requirements}


def test_the_gateway_needs_no_arithmetic() -> None:
    needed = names(third_party(rooms(ROOT / "requirements" / "gateway.txt")))
    assert {"grpcio", "starlette", "tokenizers"} <= needed
    assert not needed & {"torch", "numpy", "libucx-cu13", "safetensors"}


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_a_worker_needs_no_front(service: str) -> None:
    listed = rooms(ROOT / "requirements" / f"{service}.txt")
    needed = names(third_party(listed))
    assert {"torch", "libucx-cu13", "grpcio"} <= needed
    assert not needed & {"starlette", "uvicorn", "tokenizers", "typer"}
    assert f"./services/{service}" in folders(listed, "rooms")
    assert f"./services/{service}" not in folders(listed, "libs")


def test_both_workers_install_the_same() -> None:
    """So that they share the layer that holds it."""
    prefill, decode = (rooms(ROOT / "requirements" / f"{name}.txt") for name in ("prefill", "decode"))
    assert third_party(prefill) == third_party(decode)
    assert folders(prefill, "libs") == folders(decode, "libs")


def test_a_room_that_is_not_listed_is_told(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("-e ./services/gateway  # alone\n")
    with pytest.raises(ClosureError, match="services/gateway needs baton-servicekit"):
        third_party(rooms(short))
    short.write_text("requests\n")
    with pytest.raises(ClosureError, match="line 1: 'requests' is not a room"):
        rooms(short)
    short.write_text("-e ./libs/kvtransfer[cu11]\n")
    with pytest.raises(ClosureError, match="no extra 'cu11'; it has cu12, cu13, test"):
        third_party(rooms(short))
