"""From the host to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: List[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor on `device`, in the order of the current stream. Pinned on the way, so that the copy does not block; torch's
    allocator of pinned memory keeps the block until the copy has run."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_array(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """The same for numbers that numpy has; on a CPU they are not copied."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
