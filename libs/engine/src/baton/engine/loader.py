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
from baton.engine.model_config import load_model_config
from baton.engine.models.llama import LlamaModel
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
) -> LlamaModel | DeviceModel:
    """Reads config.json and the safetensors of `folder` and converts the weights to `dtype` (float32 or bfloat16).

    device: cpu, or a GPU by torch's name (cuda:0): the weights go straight there, and a DeviceModel is returned. load_format: auto, or dummy:
    random weights of the shapes that config.json gives, for measuring. progress: told the bytes read and the bytes to read.

    role: what the model will mostly do. Any model runs in any role, with the same results; in float32 the prefill and plain roles keep
    two copies of the layers' weights, one laid out for long prompts and one for few rows, the decode role only the second.

    Raises ModelConfigError or WeightsError, each naming the file, the field or tensor, and what was expected.
    """
    kind = torch_dtype(dtype)
    config = load_model_config(folder)
    place = torch_device(device)
    if load_format not in LOAD_FORMATS:
        raise InvalidSettingError("load_format", load_format, f"must be one of {', '.join(LOAD_FORMATS)}")
    with torch.inference_mode(), WeightReader(folder, kind, progress) if load_format == "auto" else nullcontext() as files:
        reader: Reader = DummyReader(kind, progress=progress) if files is None else files
        if place.type == "cuda":
            return DeviceModel(config, reader, kind, place)
        return LlamaModel(config, reader, kind, Tuning.FEW_ROWS if role is Role.DECODE else Tuning.ANY)
