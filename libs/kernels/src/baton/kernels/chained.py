"""Whether launches of one stream may overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_chained: ContextVar[bool] = ContextVar("chained", default=False)
#: Compute capability of Hopper.
LEAST_CAPABILITY = (9, 0)


def can_chain(device: torch.device) -> bool:
    """Whether kernels on `device` may be launched within `chain_launches`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@contextmanager
def chain_launches() -> Iterator[None]:
    """Within: a kernel of a decode step may be set up while the one before it drains, and waits on the device for its results (programmatic
    dependent launch). It counts for launches and captures of this thread; results are the same.

    Raises ValueError where there is no GPU that can do this (Hopper and later).
    """
    if not (torch.cuda.is_available() and can_chain(torch.device("cuda"))):
        found = f"compute capability {torch.cuda.get_device_capability()}" if torch.cuda.is_available() else "no GPU"
        raise ValueError(f"launches can be chained from compute capability {LEAST_CAPABILITY} on; here is {found}")
    before = _chained.set(True)
    try:
        yield
    finally:
        _chained.reset(before)


def is_chained() -> bool:
    """Whether this thread is within `chain_launches`."""
    return _chained.get()
