"""What the package offers, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import baton.kernels as bk


def test_every_kernel_has_a_naive_twin_with_its_arguments():
    names = [
        name for name in bk.__all__ if not name.startswith("naive_") and name not in {"can_chain", "chain_launches", "is_chained", "whole_digest"}
    ]
    assert len(names) == 21
    for name in names:
        ours, twin = (list(inspect.signature(getattr(bk, each)).parameters) for each in (name, f"naive_{name}"))
        assert ours == twin, name


def test_importing_the_package_does_not_import_triton():
    subprocess.run([sys.executable, "-c", "import baton.kernels, sys; assert 'triton' not in sys.modules"], check=True, timeout=60)
