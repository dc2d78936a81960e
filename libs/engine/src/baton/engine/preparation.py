"""Everything between a folder and an engine that can start: checked, loaded, its KV pool sized. No port is open yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.engine.config import EngineConfig, plan_layout
from baton.engine.device.model import DeviceModel
from baton.engine.device.page_hash import DevicePageHash
from baton.engine.errors import InvalidSettingError
from baton.engine.layout import KVLayout
from baton.engine.loader import load_model, torch_device
from baton.engine.memory import cpu_free_bytes, cpu_need, device_need, require_memory
from baton.engine.model_config import ModelConfig, load_model_config
from baton.engine.models.llama import LlamaModel
from baton.engine.pool import KVPool
from baton.engine.types import Role
from baton.engine.weights import Progress

#: The KV pool on a CPU when nobody says how large.
CPU_KV_BYTES = 1 << 30

#: What captured decode steps and the libraries' workspaces take beside the estimate of `device_need`.
GRAPH_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Prepared:
    """config: with the size of the pool settled. layout: of that pool."""

    model: LlamaModel | DeviceModel
    config: EngineConfig
    layout: KVLayout

    def device_pool(self) -> KVPool | None:
        """The pool on the model's GPU; None on a CPU, where it lives in host memory that the caller may bring."""
        if isinstance(self.model, LlamaModel):
            return None
        return KVPool(self.layout, self.model.dtype, device=self.model.device)

    def page_hash(self, pool: KVPool | None) -> DevicePageHash | None:
        """The digest of pages in `device_pool`; None where that is None."""
        return None if pool is None else DevicePageHash(pool)


def prepare(
    folder: str | Path,
    config: EngineConfig,
    role: Role,
    *,
    device: str = "cpu",
    load_format: str = "auto",
    memory_fraction: float = 0.9,
    progress: Progress | None = None,
) -> Prepared:
    """Reads config.json, asks whether weights, pool and workspace fit, loads the weights, and settles the size of the pool.

    A pool whose size `config` leaves open takes CPU_KV_BYTES on a CPU; on a GPU all that is free when the weights are there, but for
    1 - memory_fraction of the whole memory and the workspace of a step. Raises ModelConfigError, WeightsError, InvalidSettingError or
    InsufficientMemoryError; each says what to change.
    """
    if not 0 < memory_fraction <= 1:
        raise InvalidSettingError("memory_fraction", memory_fraction, "must be above 0 and at most 1")
    place = torch_device(device)
    model_config = load_model_config(folder)
    open_size = config.num_pages is None and config.kv_bytes is None
    if place.type == "cpu":
        config = replace(config, kv_bytes=CPU_KV_BYTES) if open_size else config
        require_memory(cpu_need(model_config, config, role), cpu_free_bytes(), device, _page_bytes(model_config, config))
    else:
        at_least = replace(config, num_pages=1) if open_size else config
        _require_on_device(model_config, at_least, place, memory_fraction)
    model = load_model(folder, config.dtype, role, device=device, load_format=load_format, progress=progress)
    if open_size and place.type != "cpu":
        config = replace(config, kv_bytes=_kv_bytes(model_config, config, place, memory_fraction))
    return Prepared(model, config, plan_layout(model_config, config))


def _page_bytes(model: ModelConfig, config: EngineConfig) -> int:
    return plan_layout(model, replace(config, num_pages=1, kv_bytes=None)).pool_bytes


def _usable(place: torch.device, memory_fraction: float) -> int:
    free, total = torch.cuda.mem_get_info(place)
    return max(0, free - int((1 - memory_fraction) * total) - GRAPH_BYTES)


def _require_on_device(model: ModelConfig, config: EngineConfig, place: torch.device, memory_fraction: float) -> None:
    require_memory(device_need(model, config), _usable(place, memory_fraction), str(place), _page_bytes(model, config))


def _kv_bytes(model: ModelConfig, config: EngineConfig, place: torch.device, memory_fraction: float) -> int:
    """What is left for the pool, now that the weights are on the device."""
    torch.cuda.empty_cache()
    need = device_need(model, replace(config, num_pages=1))
    return max(_usable(place, memory_fraction) - need.workspace, _page_bytes(model, config))
