from __future__ import annotations

import subprocess
import sys

import baton.servicekit


def test_the_public_face_is_sorted_and_complete() -> None:
    names = baton.servicekit.__all__
    assert names == sorted(names)
    assert all(hasattr(baton.servicekit, name) for name in names)


def test_torch_is_not_reached() -> None:
    script = "import baton.servicekit, sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy') or m.startswith('baton.')))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "torch" not in out
    assert "numpy" not in out
    assert "baton.engine" not in out
    assert "baton.wire" not in out
