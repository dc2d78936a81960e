"""What two servers must share before KV pages may move between them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton.engine.layout import LAYOUT_NAME, KVLayout
from baton.wire.v1 import common_pb2

PROTOCOL_VERSION = 1


def weights_hash(model_path: Path) -> str:
    """A hash over config.json's bytes and the names and sizes of the weight files: cheap, and enough to tell two models apart."""
    state = hashlib.sha256((model_path / "config.json").read_bytes())
    for path in sorted(model_path.glob("*.safetensors")):
        state.update(f"{path.name}:{path.stat().st_size}\n".encode())
    return state.hexdigest()[:32]


def fingerprint(model: str, model_path: Path, dtype: str, layout: KVLayout) -> common_pb2.KVFingerprint:
    return common_pb2.KVFingerprint(
        protocol_version=PROTOCOL_VERSION,
        model=model,
        weights=weights_hash(model_path),
        dtype=dtype,
        layout=LAYOUT_NAME,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
    )


def as_mapping(value: common_pb2.KVFingerprint) -> dict[str, str]:
    """Every field by name, also those at their default."""
    return {field.name: str(getattr(value, field.name)) for field in value.DESCRIPTOR.fields}


def differences(ours: common_pb2.KVFingerprint, theirs: common_pb2.KVFingerprint) -> list[str]:
    """One text for each field that differs, with both values; empty when the pair fits."""
    here, there = as_mapping(ours), as_mapping(theirs)
    return [f"{name}: {here[name]!r} here, {there[name]!r} there" for name in here if here[name] != there[name]]
