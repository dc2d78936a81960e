"""From a Hugging Face folder to a model that can run."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.engine.config import ITEMSIZES
from baton.engine.errors import InvalidSettingError
from baton.engine.model_config import load_model_config
from baton.engine.models.llama import LlamaModel
from baton.engine.weights import WeightReader


def torch_dtype(name: str) -> torch.dtype:
    """float32 or bfloat16; anything else raises InvalidSettingError."""
    if name not in ITEMSIZES:
        raise InvalidSettingError("dtype", name, f"must be one of {', '.join(ITEMSIZES)}")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_model(folder: str | Path, dtype: str = "float32") -> LlamaModel:
    """Reads config.json and the safetensors of `folder` and converts the weights to `dtype` (float32 or bfloat16).

    Raises ModelConfigError or WeightsError, each naming the file, the field or tensor, and what was expected.
    """
    kind = torch_dtype(dtype)
    config = load_model_config(folder)
    with torch.inference_mode(), WeightReader(folder, kind) as reader:
        return LlamaModel(config, reader, kind)
