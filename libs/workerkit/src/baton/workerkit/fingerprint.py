"""The engine's fingerprint as a message, and where two of them differ: what two servers must share before KV pages may move between them."""

from __future__ import annotations

from dataclasses import asdict

from baton.engine.fingerprint import Fingerprint
from baton.wire.v1 import common_pb2


def fingerprint_to_wire(value: Fingerprint) -> common_pb2.KVFingerprint:
    return common_pb2.KVFingerprint(**asdict(value))


def as_mapping(value: common_pb2.KVFingerprint) -> dict[str, str]:
    """Every field by name, also those at their default."""
    return {field.name: str(getattr(value, field.name)) for field in value.DESCRIPTOR.fields}


def differences(ours: common_pb2.KVFingerprint, theirs: common_pb2.KVFingerprint) -> list[str]:
    """One text for each field that differs, with both values; empty when the pair fits."""
    here, there = as_mapping(ours), as_mapping(theirs)
    return [f"{name}: {here[name]!r} here, {there[name]!r} there" for name in here if here[name] != there[name]]
