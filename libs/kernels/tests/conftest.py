"""Without a GPU the kernels run in Triton's interpreter, on CPU tensors. BATON_KERNELS_DEVICE names the device; default: a GPU if there is one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import DEVICE

SWITCH = "TRITON_INTERPRET"

if DEVICE == "cpu":
    # Triton looks at its switch when a kernel is defined. It is off again for the tests of other rooms, whose CPU tensors want the naive twins.
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    from baton.kernels.device import activation, decode, digest, experts, grouped, linear, norm, pages, prefill, rope, sampling, seats  # noqa: F401

    if before is None:
        del os.environ[SWITCH]


@pytest.fixture(autouse=True)
def _triton_side(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setenv(SWITCH, "1")


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch):
    """What torch.empty gives holds NaN (or an absurd integer): an element that nobody writes is seen."""
    real = torch.empty

    def empty(*size, **kind):
        tensor = real(*size, **kind)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", empty)
