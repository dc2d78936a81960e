"""From a Hugging Face folder to a model that can run."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from baton.engine.config import ITEMSIZES
from baton.engine.device.model import DeviceModel
from baton.engine.dummy_weights import DummyReader
from baton.engine.errors import InvalidSettingError
from baton.engine.linear import Tuning
from baton.engine.memory import weight_bytes
from baton.engine.model_config import ModelConfig, load_model_config
from baton.engine.models.collective import Collective
from baton.engine.models.llama import LlamaModel
from baton.engine.parallel.groups import rank_devices
from baton.engine.parallel.model import ShardedModel
from baton.engine.shard import shard_config
from baton.engine.types import Role
from baton.engine.weights import Progress, Reader, WeightReader

LOAD_FORMATS = ("auto", "dummy")


def torch_dtype(name: str) -> torch.dtype:
    """float32 or bfloat16; anything else raises InvalidSettingError."""
    if name not in ITEMSIZES:
        raise InvalidSettingError("dtype", name, f"must be one of {', '.join(ITEMSIZES)}")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def torch_device(name: str) -> torch.device:
    """cpu or cuda:N, and there; anything else raises InvalidSettingError."""
    if name == "cpu":
        return torch.device(name)
    kind, _, number = name.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise InvalidSettingError("device", name, "must be cpu or cuda:N")
    if int(number) >= torch.cuda.device_count():
        raise InvalidSettingError("device", name, f"torch sees {torch.cuda.device_count()} CUDA devices here")
    return torch.device(name)


def load_model(
    folder: str | Path,
    dtype: str = "float32",
    role: Role = Role.PLAIN,
    *,
    device: str = "cpu",
    load_format: str = "auto",
    progress: Progress | None = None,
    tensor_parallel: int = 1,
    deterministic: bool = False,
) -> LlamaModel | DeviceModel | ShardedModel:
    """Reads config.json and the safetensors of `folder` and converts the weights to `dtype` (float32 or bfloat16).

    device: cpu, or a GPU by torch's name (cuda:0): the weights go straight there, and a DeviceModel is returned. load_format: auto, or dummy:
    random weights of the shapes that config.json gives, for measuring. progress: told the bytes read and the bytes to read.

    role: what the model will mostly do. Any model runs in any role, with the same results; in float32 the prefill and plain roles keep
    two copies of the layers' weights, one laid out for long prompts and one for few rows, the decode role only the second.

    tensor_parallel: above 1, a ShardedModel of that many ranks: on GPUs `device` and those after it, on a CPU threads that share it. Each rank
    reads its own part of the bytes. Its caller closes it. deterministic: as in EngineConfig; only sums over ranks heed it here.

    Raises InvalidSettingError; ModelConfigError or WeightsError, each naming the file, the field or tensor, and what was expected.
    """
    kind = torch_dtype(dtype)
    config = load_model_config(folder)
    place = torch_device(device)
    if load_format not in LOAD_FORMATS:
        raise InvalidSettingError("load_format", load_format, f"must be one of {', '.join(LOAD_FORMATS)}")

    def load(group: Collective | None, place: torch.device, progress: Progress | None) -> LlamaModel | DeviceModel:
        with torch.inference_mode(), WeightReader(folder, kind, progress) if load_format == "auto" else nullcontext() as files:
            reader: Reader = DummyReader(kind, progress=progress) if files is None else files
            if place.type == "cuda":
                return DeviceModel(config, reader, kind, place, group)
            return LlamaModel(config, reader, kind, Tuning.FEW_ROWS if role is Role.DECODE else Tuning.ANY, group)

    if tensor_parallel == 1:
        return load(None, place, progress)
    shard_config(config, tensor_parallel)  # refuses a degree that does not fit this model
    devices = rank_devices(place, tensor_parallel)
    told = None if progress is None else _of_all_ranks(progress, config, tensor_parallel)

    def load_rank(rank: int, group: Collective, device: torch.device) -> LlamaModel | DeviceModel:
        return load(group, device, told if rank == 0 else None)

    return ShardedModel(config, kind, devices, load_rank, deterministic=deterministic)


def _of_all_ranks(progress: Progress, config: ModelConfig, degree: int) -> Progress:
    """What rank 0 reads stands for all: they read equal shares side by side."""
    own, whole = weight_bytes(config, 1, degree), weight_bytes(config, 1)

    def told(num_bytes: int, num_wanted: int) -> None:
        progress(num_bytes * degree, max(num_wanted * own // whole, num_bytes) * degree)

    return told
