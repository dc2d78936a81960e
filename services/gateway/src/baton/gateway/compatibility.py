"""Whether KV pages may move from one server to another. Pure."""

from __future__ import annotations

from baton.wire.v1 import common_pb2, worker_pb2


def differences(prefill: worker_pb2.WorkerInfo, decode: worker_pb2.WorkerInfo) -> list[str]:
    """One text for each field of the fingerprints that differs, with both values; empty when the pair fits."""
    ours, theirs = prefill.fingerprint, decode.fingerprint
    return [
        f"{field.name}: {getattr(ours, field.name)!r} at {prefill.instance_id}, {getattr(theirs, field.name)!r} at {decode.instance_id}"
        for field in common_pb2.KVFingerprint.DESCRIPTOR.fields
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
