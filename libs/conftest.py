"""Triton decides when it is first imported, by whichever test does so, whether kernels run in its interpreter."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
