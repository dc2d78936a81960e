"""What two engines must share before KV pages may move between them (the fields of `KVFingerprint` in common.proto)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from baton.engine.config import EngineConfig
from baton.engine.layout import LAYOUT_NAME
from baton.engine.model_config import CONFIG_FILE, ModelConfig
from baton.engine.weight_files import weight_files

#: Raised whenever the meaning of a page's bytes changes. 1: keys are rotated in interleaved pairs (see models/llama.py).
PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Compared field by field; equal fingerprints mean that a page of one engine can be read by the other."""

    protocol_version: int
    model: str
    weights: str
    dtype: str
    layout: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int


def fingerprint(folder: str | Path, model_name: str, model: ModelConfig, config: EngineConfig, load_format: str = "auto") -> Fingerprint:
    """`model_name` is what clients call the model. Reads names and sizes of the weight files, never their contents; none if they are dummies."""
    return Fingerprint(
        protocol_version=PROTOCOL_VERSION,
        model=model_name,
        weights=weights_digest(folder, load_format),
        dtype=config.dtype,
        layout=LAYOUT_NAME,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
    )


def weights_digest(folder: str | Path, load_format: str = "auto") -> str:
    """SHA-256 (hex) over config.json and the name and size of every file that weights are read from. Raises WeightsError for one that cannot be.

    Dummy weights follow from config.json, so two servers that load a folder as "dummy" match each other, and no server with the real ones.
    """
    folder = Path(folder)
    if load_format == "dummy":
        return hashlib.sha256((folder / CONFIG_FILE).read_bytes() + b"\0dummy").hexdigest()
    files = weight_files(folder)
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    for file in files:
        digest.update(f"\0{file.relative_to(folder)}\0{file.stat().st_size}".encode())
    return digest.hexdigest()
