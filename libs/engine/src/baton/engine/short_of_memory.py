"""Memory that was there by arithmetic and is not when it is asked for: told as what did not fit, how much was wanted, and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.engine.errors import InsufficientMemoryError
from baton.engine.memory import cpu_free_bytes

_ASKED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)
#: Of allocators that raise no type of their own: torch's of the CPU; the driver under a graph, a library's handle or a kernel.
_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")

LESS_POOL = "lower kv_bytes or num_pages (memory_fraction where neither is set)"
FEWER_GRAPHS = f"{LESS_POOL}, or lower max_running and max_num_batched_tokens for fewer and smaller captured steps, or turn cuda_graphs off"
SHORTER_STEPS = f"{LESS_POOL}, or lower max_num_batched_tokens and max_running for a smaller step"


@contextmanager
def asked_for(what: str, device: torch.device | str, remedy: str) -> Iterator[None]:
    """Raises InsufficientMemoryError in the place of whatever says that `device` has no memory left. what: that was to get it."""
    try:
        yield
    except Exception as error:
        shortage = None if isinstance(error, InsufficientMemoryError) else _shortage(error)
        if shortage is None:
            raise
        raise InsufficientMemoryError(_told(what, torch.device(device), shortage, remedy)) from error


def _shortage(error: BaseException) -> BaseException | None:
    """What was short of memory among an error and those behind it: a capture that ends in the middle, or a rank, raises its own in front."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if isinstance(each, torch.OutOfMemoryError | MemoryError) or (
            isinstance(each, RuntimeError | OSError) and any(words in str(each).lower() for words in _WORDS)
        ):
            return each
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return None


def _told(what: str, device: torch.device, shortage: BaseException, remedy: str) -> str:
    found = _ASKED.search(str(shortage))
    wanted = f"{found[1]} more were asked for" if found else "an allocation failed"
    return f"memory of {device}: {what} did not fit: {wanted}, {_free_bytes(device) / 1e9:.3f} GB are free; {remedy}"


def _free_bytes(device: torch.device) -> int:
    """What the driver would give, and what torch has from it and does not use."""
    if device.type != "cuda":
        return cpu_free_bytes()
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
