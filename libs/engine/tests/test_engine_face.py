"""What the package shows, and what importing it does not drag in."""

from __future__ import annotations

import subprocess
import sys

import pytest

import baton.engine

PURE = [
    "baton.engine",
    "baton.engine.types",
    "baton.engine.inventory",
    "baton.engine.memory",
    "baton.engine.ports",
    "baton.engine.testing",
    "baton.engine.scheduling.prefill",
    "baton.engine.scheduling.decode",
    "baton.engine.scheduling.plain",
]


def test_every_exported_name_exists():
    for name in baton.engine.__all__:
        assert getattr(baton.engine, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = baton.engine.no_such_name


def test_policy_and_contracts_import_no_torch():
    code = f"import sys; import {', '.join(PURE)}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
