"""Makes the collectives of one engine's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from baton.engine.errors import InvalidSettingError
from baton.engine.models.collective import BackendGroup, Collective
from baton.engine.parallel.thread_group import Meeting, ThreadGroup

#: make(rank) -> that rank's end of the group; every rank calls it, each on its own thread.
GroupMaker = Callable[[int], Collective]


def rank_devices(first: torch.device, degree: int) -> tuple[torch.device, ...]:
    """cuda:N and those after it; the CPU as often as asked for. Raises InvalidSettingError when there are too few."""
    if first.type != "cuda":
        return (first,) * degree
    numbers = range(first.index, first.index + degree)
    if numbers.stop > torch.cuda.device_count():
        limit = f"from {first} on there are {torch.cuda.device_count() - first.index} CUDA devices here: lower it, or --device"
        raise InvalidSettingError("tensor_parallel", degree, limit)
    return tuple(torch.device("cuda", number) for number in numbers)


def group_maker(devices: Sequence[torch.device], *, deterministic: bool) -> GroupMaker:
    """On a CPU the ranks meet in memory; GPUs of one host meet through NCCL."""
    if devices[0].type == "cpu":
        meeting = Meeting(len(devices))
        return lambda rank: ThreadGroup(meeting, rank)
    if not dist.is_nccl_available():
        raise InvalidSettingError("tensor_parallel", len(devices), "this build of torch has no NCCL, which ranks on GPUs need")
    store = dist.HashStore()  # type: ignore[attr-defined]
    return lambda rank: BackendGroup(_nccl(store, rank, len(devices)), ordered=deterministic)


def _nccl(store: Any, rank: int, size: int) -> Any:
    return dist.ProcessGroupNCCL(dist.PrefixStore("baton-ranks", store), rank, size, dist.ProcessGroupNCCL.Options())  # type: ignore[attr-defined]
