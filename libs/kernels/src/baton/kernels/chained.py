"""Whether launches of one stream may overlap."""

from __future__ import annotations

import torch

_chained = False


def chain_launches(on: bool) -> None:
    """On: a kernel of a decode step may be set up while the one before it drains, and waits on the device for its results (programmatic
    dependent launch). It counts for launches and captures from now on, of the whole process; results are the same. Off from the start.

    Raises ValueError where there is no GPU that can do this (Hopper and later).
    """
    global _chained
    if on and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)):
        found = f"compute capability {torch.cuda.get_device_capability()}" if torch.cuda.is_available() else "no GPU"
        raise ValueError(f"launches can be chained from compute capability (9, 0) on; here is {found}")
    _chained = on


def chained() -> bool:
    return _chained
