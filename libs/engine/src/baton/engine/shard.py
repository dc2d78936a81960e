"""Tensor parallelism as arithmetic: what one rank of a group holds of every tensor. No communication here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from baton.engine.errors import InvalidSettingError
from baton.engine.inventory import Split, TensorSpec, inventory
from baton.engine.model_config import ModelConfig
from baton.engine.weights import Part, Reader

FIELD = "tensor_parallel"

#: Of one group; more GPUs than one host has.
MOST_RANKS = 64


def shard_config(config: ModelConfig, degree: int) -> ModelConfig:
    """The model as one of `degree` equal ranks sees it: its heads, its KV heads, its inner columns, its words.

    Raises InvalidSettingError unless `degree` divides the KV heads (they are never held twice, so that pages of unequal degrees can be
    joined and cut by heads), the inner sizes and the vocabulary.
    """
    if degree < 1:
        raise InvalidSettingError(FIELD, degree, "must be at least 1")
    moe = config.moe
    divided = {"num_key_value_heads": config.num_kv_heads, "vocab_size": config.vocab_size}
    if not all(config.is_sparse(layer) for layer in range(config.num_layers)):
        divided["intermediate_size"] = config.intermediate_size
    if moe is not None:
        divided["the experts' intermediate_size"] = moe.intermediate_size
    common = math.gcd(*divided.values())
    for name, size in divided.items():
        if size % degree:
            fitting = ", ".join(str(number) for number in range(1, min(common, MOST_RANKS) + 1) if common % number == 0)
            raise InvalidSettingError(FIELD, degree, f"must divide {name} ({size}); this model takes {fitting}")
    return dataclasses.replace(
        config,
        vocab_size=config.vocab_size // degree,
        intermediate_size=config.intermediate_size // degree,
        num_heads=config.num_heads // degree,
        num_kv_heads=config.num_kv_heads // degree,
        moe=None if moe is None else dataclasses.replace(moe, intermediate_size=moe.intermediate_size // degree),
    )


def part_of(spec: TensorSpec, rank: int, degree: int) -> Part | None:
    """What rank `rank` of `degree` reads of a tensor; None: all of it, or for `Split.FIRST` on other ranks than 0 nothing."""
    if spec.split not in (Split.ROWS, Split.COLUMNS):
        return None
    axis = 0 if spec.split is Split.ROWS else len(spec.shape) - 1
    share = spec.shape[axis] // degree
    return Part(axis, rank * share, (rank + 1) * share)


class ShardedReader:
    """A Reader that asks another for one rank's parts. Shapes given to `read` are those of `shard_config(config, degree)`."""

    def __init__(self, reader: Reader, config: ModelConfig, rank: int, degree: int) -> None:
        if not 0 <= rank < degree:
            raise InvalidSettingError("rank", rank, f"must be from 0 to {degree - 1} ({FIELD} {degree})")
        self._reader = reader
        self._specs = {spec.name: spec for spec in inventory(config)}
        self._rank = rank
        self._degree = degree

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """`specs` are those of the whole model."""
        self._reader.check(specs)

    def read(self, name: str, shape: tuple[int, ...], device: torch.device | str | None = None, part: Part | None = None) -> Tensor:
        """This rank's part in memory of its own; nothing else of the tensor is read. `part` must be None: parts are not cut twice."""
        assert part is None, f"{name} is already cut for rank {self._rank}"
        spec = self._specs[name]
        tensor = self._reader.read(name, spec.shape, device, part_of(spec, self._rank, self._degree))
        assert tuple(tensor.shape) == shape, f"{name}: rank {self._rank} of {self._degree} has {tuple(tensor.shape)}, the model wants {shape}"
        return tensor.zero_() if spec.split is Split.FIRST and self._rank else tensor
