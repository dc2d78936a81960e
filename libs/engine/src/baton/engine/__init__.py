"""The inference engine of Baton. Importing this package does not import torch: what needs it is loaded at first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from baton.engine.config import EngineConfig, max_model_len, plan_layout
from baton.engine.errors import (
    DuplicateRoomError,
    EngineError,
    InsufficientMemoryError,
    InvalidSettingError,
    ModelConfigError,
    ModelFolderError,
    WeightsError,
)
from baton.engine.fingerprint import Fingerprint, fingerprint
from baton.engine.layout import LAYOUT_NAME, KVLayout
from baton.engine.model_config import ModelConfig, load_model_config
from baton.engine.types import EngineEvent, EngineStats, Failure, FinishReason, Request, Role, SamplingParams

if TYPE_CHECKING:
    from baton.engine.engine import Engine
    from baton.engine.loader import load_model
    from baton.engine.pool import KVPool, buffer_at
    from baton.engine.preparation import Prepared, prepare

__all__ = [
    "LAYOUT_NAME",
    "DuplicateRoomError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineEvent",
    "EngineStats",
    "Failure",
    "Fingerprint",
    "FinishReason",
    "InsufficientMemoryError",
    "InvalidSettingError",
    "KVLayout",
    "KVPool",
    "ModelConfig",
    "ModelConfigError",
    "ModelFolderError",
    "Prepared",
    "Request",
    "Role",
    "SamplingParams",
    "WeightsError",
    "buffer_at",
    "fingerprint",
    "load_model",
    "load_model_config",
    "max_model_len",
    "plan_layout",
    "prepare",
]

_NEEDS_TORCH = {
    "Engine": "engine",
    "KVPool": "pool",
    "Prepared": "preparation",
    "buffer_at": "pool",
    "load_model": "loader",
    "prepare": "preparation",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(f"baton.engine.{_NEEDS_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
