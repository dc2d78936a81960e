"""What the kernels cannot run, told by the field that is to blame, before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from baton.engine.config import EngineConfig
from baton.engine.errors import InvalidSettingError, ModelConfigError
from baton.engine.model_config import ModelConfig
from baton.engine.shard import shard_config
from baton.kernels.limits import DEPTH_STEP, MAX_EXPERTS, MAX_HEAD_DIM, MAX_HIDDEN, MAX_PAGE_SIZE


def require_runnable(model: ModelConfig, config: EngineConfig, degree: int, file: Path) -> None:
    """degree: ranks that share the model. file: the config.json, which errors name.

    Raises InvalidSettingError for a page size, ModelConfigError for a size of the model that no GPU kernel takes.
    """
    if config.page_size > MAX_PAGE_SIZE or config.page_size & (config.page_size - 1):
        raise InvalidSettingError("page_size", config.page_size, f"on a GPU it must be a power of two, at most {MAX_PAGE_SIZE}")
    for field, value, most in _bounded(model):
        if value > most:
            raise ModelConfigError(file, f"{field} = {value}: must be at most {most} on a GPU", field)
    for (field, whole), (_, own) in zip(_depths(model), _depths(shard_config(model, degree)), strict=True):
        if own % DEPTH_STEP:
            share = "" if degree == 1 else f", {own} on each of {degree} ranks"
            raise ModelConfigError(file, f"{field} = {whole}{share}: must be a multiple of {DEPTH_STEP} on a GPU", field)


def _bounded(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    yield "head_dim", model.head_dim, MAX_HEAD_DIM
    yield "hidden_size", model.hidden_size, MAX_HIDDEN
    if model.moe is not None:
        yield "num_experts", model.moe.num_experts, MAX_EXPERTS


def _depths(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Of the products of a layer: how many numbers each of their sums adds up."""
    yield "hidden_size", model.hidden_size
    yield "num_attention_heads * head_dim", model.num_heads * model.head_dim
    if not all(model.is_sparse(layer) for layer in range(model.num_layers)):
        yield "intermediate_size", model.intermediate_size
    if model.moe is not None:
        yield "the experts' intermediate_size", model.moe.intermediate_size
