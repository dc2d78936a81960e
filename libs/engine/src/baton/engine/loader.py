"""From a Hugging Face folder to a model that can run."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.engine.config import ITEMSIZES
from baton.engine.errors import InvalidSettingError
from baton.engine.linear import Tuning
from baton.engine.model_config import load_model_config
from baton.engine.models.llama import LlamaModel
from baton.engine.types import Role
from baton.engine.weights import WeightReader


def torch_dtype(name: str) -> torch.dtype:
    """float32 or bfloat16; anything else raises InvalidSettingError."""
    if name not in ITEMSIZES:
        raise InvalidSettingError("dtype", name, f"must be one of {', '.join(ITEMSIZES)}")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_model(folder: str | Path, dtype: str = "float32", role: Role = Role.PLAIN) -> LlamaModel:
    """Reads config.json and the safetensors of `folder` and converts the weights to `dtype` (float32 or bfloat16).

    role: what the model will mostly do. Any model runs in any role, with the same results; in float32 the prefill and plain roles keep
    two copies of the layers' weights, one laid out for long prompts and one for few rows, the decode role only the second.

    Raises ModelConfigError or WeightsError, each naming the file, the field or tensor, and what was expected.
    """
    kind = torch_dtype(dtype)
    config = load_model_config(folder)
    with torch.inference_mode(), WeightReader(folder, kind) as reader:
        return LlamaModel(config, reader, kind, Tuning.FEW_ROWS if role is Role.DECODE else Tuning.ANY)
