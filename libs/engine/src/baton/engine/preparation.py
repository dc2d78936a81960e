"""Everything between a folder and an engine that can start: checked, loaded, its KV pool sized. No port is open yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.engine.config import EngineConfig, plan_layout
from baton.engine.device.limits import require_runnable
from baton.engine.device.model import DeviceModel
from baton.engine.device.page_hash import DevicePageHash
from baton.engine.errors import InvalidSettingError
from baton.engine.layout import KVLayout
from baton.engine.loader import load_model, torch_device
from baton.engine.memory import cpu_free_bytes, cpu_need, device_need, require_memory
from baton.engine.model_config import CONFIG_FILE, ModelConfig, load_model_config
from baton.engine.models.llama import LlamaModel
from baton.engine.parallel.groups import rank_devices
from baton.engine.parallel.model import ShardedModel
from baton.engine.parallel.pool import ShardedPool
from baton.engine.pool import KVPool
from baton.engine.shard import shard_config
from baton.engine.short_of_memory import asked_for
from baton.engine.types import Role
from baton.engine.weight_files import weight_files
from baton.engine.weights import Progress

#: The KV pool on a CPU when nobody says how large.
CPU_KV_BYTES = 1 << 30

#: What captured decode steps and the libraries' workspaces take beside the estimate of `device_need`.
GRAPH_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Prepared:
    """config: with the size of the pool settled. layout: of that pool, of all ranks together. Close it when its engine has stopped."""

    model: LlamaModel | DeviceModel | ShardedModel
    config: EngineConfig
    layout: KVLayout

    @property
    def degree(self) -> int:
        """Ranks, each with a pool of `rank_layout`."""
        return self.model.degree if isinstance(self.model, ShardedModel) else 1

    @property
    def rank_layout(self) -> KVLayout:
        return self.layout.of_rank(self.degree)

    def device_pool(self) -> KVPool | ShardedPool | None:
        """The pool on the model's GPUs; None on a CPU, where it lives in host memory that the caller may bring."""
        if self.model.device.type == "cpu":
            return None
        if isinstance(self.model, ShardedModel):
            return ShardedPool.make(self.layout, self.model.dtype, self.model.devices)
        return KVPool(self.layout, self.model.dtype, device=self.model.device)

    def host_pool(self, buffers: Sequence[memoryview]) -> KVPool | ShardedPool:
        """The pool in memory of the caller, who keeps it alive: a buffer of `rank_layout.pool_bytes` for each rank."""
        if isinstance(self.model, ShardedModel):
            return ShardedPool.over(self.layout, self.model.dtype, buffers)
        (buffer,) = buffers
        return KVPool(self.layout, self.model.dtype, buffer)

    def page_hashes(self, pool: KVPool | ShardedPool | None) -> list[DevicePageHash]:
        """The digests of pages in `device_pool`, one a rank; none where that is None."""
        return [] if pool is None else [DevicePageHash(part) for part in pool.parts]

    def close(self) -> None:
        """Ends the ranks' threads, where there are any. Idempotent."""
        if isinstance(self.model, ShardedModel):
            self.model.close()


def prepare(
    folder: str | Path,
    config: EngineConfig,
    role: Role,
    *,
    device: str = "cpu",
    load_format: str = "auto",
    memory_fraction: float = 0.9,
    progress: Progress | None = None,
    tensor_parallel: int = 1,
) -> Prepared:
    """Reads config.json, asks whether weights, pool and workspace fit, loads the weights, and settles the size of the pool.

    tensor_parallel: ranks; on GPUs `device` and those after it. A pool whose size `config` leaves open takes CPU_KV_BYTES on a CPU; on a GPU all
    that is free when the weights are there, but for 1 - memory_fraction of the whole memory and the workspace of a step; of several GPUs the one
    with the least says how many pages there are. Raises ModelConfigError, WeightsError, InvalidSettingError or
    InsufficientMemoryError; each says what to change.
    """
    if not 0 < memory_fraction <= 1:
        raise InvalidSettingError("memory_fraction", memory_fraction, "must be above 0 and at most 1")
    first = torch_device(device)
    model_config = load_model_config(folder)
    shard_config(model_config, tensor_parallel)  # refuses a degree that does not fit this model
    file = Path(folder) / CONFIG_FILE
    if first.type == "cuda":
        require_runnable(model_config, config, tensor_parallel, file)
    if load_format == "auto":
        weight_files(Path(folder))  # a file that is not there is told before minutes of reading the others
    places = rank_devices(first, tensor_parallel)
    open_size = config.num_pages is None and config.kv_bytes is None
    if places[0].type == "cpu":
        config = replace(config, kv_bytes=CPU_KV_BYTES) if open_size else config
        need = cpu_need(model_config, config, role, tensor_parallel)
        require_memory(need, cpu_free_bytes(), device, _page_bytes(model_config, config), file=file)
    else:
        at_least = replace(config, num_pages=1) if open_size else config
        for place in places:
            _require_on_device(model_config, at_least, place, memory_fraction, tensor_parallel, file)
    with asked_for("the weights", places[0], "a smaller dtype, a smaller model or more memory is needed: what was free before is taken now"):
        model = load_model(
            folder,
            config.dtype,
            role,
            device=device,
            load_format=load_format,
            progress=progress,
            tensor_parallel=tensor_parallel,
            deterministic=config.deterministic,
        )
    if open_size and places[0].type != "cpu":
        least = min(_kv_bytes(model_config, config, place, memory_fraction, tensor_parallel) for place in places)
        config = replace(config, kv_bytes=least * tensor_parallel)
    return Prepared(model, config, plan_layout(model_config, config))


def _page_bytes(model: ModelConfig, config: EngineConfig) -> int:
    return plan_layout(model, replace(config, num_pages=1, kv_bytes=None)).pool_bytes


def _usable(place: torch.device, memory_fraction: float) -> int:
    free, total = torch.cuda.mem_get_info(place)
    return max(0, free - int((1 - memory_fraction) * total) - GRAPH_BYTES)


def _require_on_device(model: ModelConfig, config: EngineConfig, place: torch.device, memory_fraction: float, degree: int, file: Path) -> None:
    require_memory(device_need(model, config, degree), _usable(place, memory_fraction), str(place), _page_bytes(model, config), degree, file)


def _kv_bytes(model: ModelConfig, config: EngineConfig, place: torch.device, memory_fraction: float, degree: int) -> int:
    """What is left on one device for its part of the pool, now that the weights are there."""
    with torch.cuda.device(place):
        torch.cuda.empty_cache()
    need = device_need(model, replace(config, num_pages=1), degree)
    return max(_usable(place, memory_fraction) - need.workspace, _page_bytes(model, config) // degree)
