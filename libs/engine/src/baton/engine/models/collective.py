"""What the ranks of a tensor-parallel group say to each other inside a forward pass."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]


class Collective(Protocol):
    """A group of `size` ranks of which this is number `rank`. All ranks call the same methods in the same order with equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, partial: Tensor) -> Tensor:
        """The sum over all ranks; every rank gets the same bits. `partial` belongs to the group from here on: use only what is returned."""

    def gather_columns(self, part: Tensor) -> Tensor:
        """part [n, m] of every rank, side by side in the order of ranks: [n, size * m]. `part` belongs to the group from here on."""

    def abort(self) -> None:
        """Ends the group for good, from any thread: whoever waits in it, or calls it later, gets an error. Idempotent."""


class BackendGroup:
    """A Collective over a backend of torch.distributed that the caller made: NCCL for the GPUs of one host, gloo for CPU tensors.

    No default group is needed, so that several engines can live in one process. ordered: sums are added up in the order of ranks, whatever the
    number of rows: what a row gets does not depend on the others (the deterministic mode); every rank then receives every other's part.
    """

    def __init__(self, backend: Any, *, ordered: bool = False) -> None:
        self._backend = backend
        self._rank = int(backend.rank())
        self._size = int(backend.size())
        self._ordered = ordered

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def sum_(self, partial: Tensor) -> Tensor:
        if self._ordered:
            return in_order(self._gather(partial))
        options = dist.AllreduceOptions()
        options.asyncOp = False
        _settle(self._backend.allreduce([partial], options))
        return partial

    def gather_columns(self, part: Tensor) -> Tensor:
        return self._gather(part).transpose(0, 1).reshape(len(part), -1)

    def _gather(self, part: Tensor) -> Tensor:
        """[size, n, m]."""
        whole = torch.empty(self._size, *part.shape, dtype=part.dtype, device=part.device)
        options = AllgatherOptions()
        options.asyncOp = False
        # gloo wants the parts laid end to end along the first axis.
        _settle(self._backend._allgather_base(whole.flatten(0, 1), part.contiguous(), options))  # noqa: SLF001
        return whole

    def abort(self) -> None:
        # gloo has none: there, whoever waits is let go by the time limit that the backend was made with.
        self._backend.abort()


def in_order(parts: Tensor | list[Tensor]) -> Tensor:
    """The sum of one tensor of each rank, added up in the order of ranks."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _settle(work: Any) -> None:
    """On a CPU waits for the result; on a GPU makes the current stream wait for it, not the host."""
    if work is not None:
        work.wait()
