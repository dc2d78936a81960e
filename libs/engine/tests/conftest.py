"""Small random models, and the reference that every engine is compared with."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import engine_reference


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Matrices this small gain nothing from a second thread, and lose much when the machine is busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> engine_reference.Reference:
    """A three-layer Llama with grouped heads and tied embeddings, random weights, vocabulary 131, context 256."""
    return engine_reference.make_reference(tmp_path_factory.mktemp("tiny"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """make_model(family, **config) -> Reference."""

    def make(family: str, **config: Any) -> engine_reference.Reference:
        return engine_reference.make_reference(tmp_path_factory.mktemp(family), family, **config)

    return make
