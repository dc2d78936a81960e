"""Exits 1 with advice when the shared environment of tox is not there yet."""

from __future__ import annotations

import sys
from pathlib import Path

if not (Path(sys.argv[1]) / "bin" / "pytest").exists():
    print(f"{sys.argv[1]} is missing: put house first, as in `tox run -e house,unit`", file=sys.stderr)
    raise SystemExit(1)
