"""What the contract is told of the model and of this server: files of the model's folder, and the worker's own description as its messages."""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2

from baton.sglangcompat.errors import ModelFilesError
from baton.wire.v1 import common_pb2 as baton_pb2
from baton.wire.v1 import worker_pb2

CHUNK_BYTES = 1 << 20
#: Of a model's folder, what a tokenizer is made of.
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_MODES = {baton_pb2.ROLE_PREFILL: "prefill", baton_pb2.ROLE_DECODE: "decode"}


class About:
    """path: the model's folder, in Hugging Face's format."""

    def __init__(self, path: Path) -> None:
        """Reads its configuration. Raises ModelFilesError."""
        self._path = path
        self._config = _read(path / "config.json")
        generation = _read(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
        self.eos_token_ids = _token_ids(generation.get("eos_token_id", self._config.get("eos_token_id")))
        self._started = time.time()

    def model(self, info: worker_pb2.WorkerInfo) -> Any:
        """As GetModelInfoResponse."""
        return sglang_scheduler_pb2.GetModelInfoResponse(
            model_path=str(self._path.resolve()),
            tokenizer_path=str(self._path.resolve()),
            is_generation=True,
            weight_version=info.fingerprint.weights,
            served_model_name=info.model,
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len - 1,
            vocab_size=info.vocab_size,
            model_type=str(self._config.get("model_type", "")),
            architectures=self._config.get("architectures", ()),
            eos_token_ids=self.eos_token_ids,
            bos_token_id=next(iter(_token_ids(self._config.get("bos_token_id"))), 0),
            pad_token_id=next(iter(_token_ids(self._config.get("pad_token_id"))), 0),
        )

    def server(self, info: worker_pb2.WorkerInfo) -> Any:
        """As GetServerInfoResponse. The gateway pairs servers of equal page_size."""
        arguments, load = Struct(), info.load
        arguments.update(
            {
                "model_path": str(self._path.resolve()),
                "tokenizer_path": str(self._path.resolve()),
                "served_model_name": info.model,
                "page_size": info.fingerprint.page_size,
                "disaggregation_mode": _MODES.get(info.role, "null"),
                "dtype": info.fingerprint.dtype,
            }
        )
        return sglang_scheduler_pb2.GetServerInfoResponse(
            server_args=arguments,
            server_type="grpc",
            active_requests=load.rooms,
            uptime_seconds=time.time() - self._started,
            sglang_version=f"baton {info.version}",
            max_total_num_tokens=load.total_pages * info.fingerprint.page_size,
        )

    def loads(self, info: worker_pb2.WorkerInfo) -> Any:
        """As GetLoadsResponse."""
        load, page_size = info.load, info.fingerprint.page_size
        used = (load.total_pages - load.free_pages) / load.total_pages if load.total_pages else 0.0
        row = sglang_scheduler_pb2.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.rooms,
            num_used_tokens=(load.total_pages - load.free_pages) * page_size,
            max_total_num_tokens=load.total_pages * page_size,
            token_usage=used,
            utilization=used,
            num_waiting_uncached_tokens=load.pending_prompt_tokens,
            disaggregation=sglang_scheduler_pb2.DisaggregationMetrics(mode=_MODES.get(info.role, "null")),
            queues=sglang_scheduler_pb2.QueueMetrics(waiting=load.waiting),
        )
        total = sglang_scheduler_pb2.AggregateMetrics(
            total_running_reqs=load.running,
            total_waiting_reqs=load.waiting,
            total_reqs=load.rooms,
            avg_token_usage=used,
            avg_utilization=used,
        )
        now = datetime.now(UTC).isoformat()
        return sglang_scheduler_pb2.GetLoadsResponse(timestamp=now, version=f"baton {info.version}", dp_rank_count=1, loads=[row], aggregate=total)

    def tokenizer(self) -> bytes:
        """The tokenizer's files as a ZIP archive. Blocks."""
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for pattern in _TOKENIZER_FILES:
                for file in sorted(self._path.glob(pattern)):
                    if not file.name.endswith(".index.json"):
                        archive.write(file, file.name)
        return packed.getvalue()


def chunks(data: bytes) -> Iterator[Any]:
    """As GetTokenizerChunk; the last one has the digest of all."""
    for start in range(0, len(data), CHUNK_BYTES):
        is_last = start + CHUNK_BYTES >= len(data)
        yield common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=hashlib.sha256(data).hexdigest() if is_last else "")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} is {type(value).__name__}, not an object")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    """Of one id, a list of them, or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ModelFilesError(f"{value!r} is neither a token id nor a list of them")
    return tuple(ids)
