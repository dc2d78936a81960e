"""Groups of settings that prefill and decode servers share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from baton.engine.config import EngineConfig
from baton.servicekit import SettingsGroup


class EngineSettings(SettingsGroup):
    """The model, its KV pool, and how much runs at once."""

    model_path: Path = Field(description="Folder of the model in Hugging Face's format: config.json and *.safetensors.")
    model_name: str | None = Field(default=None, min_length=1, description="Name of the model for clients; the folder's name when not set.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Numbers of weights, activations and KV pages.")
    page_size: int = Field(default=16, ge=1, le=1024, description="Tokens of one KV page; equal on all servers of a fleet.")
    num_pages: int | None = Field(default=None, ge=1, description="Pages of the KV pool; as many as --kv-bytes holds when not set.")
    kv_bytes: int = Field(default=1 << 30, ge=1, description="Bytes of the KV pool when --num-pages is not set.")
    max_model_len: int | None = Field(default=None, ge=2, description="Longest prompt and answer together, in tokens; the model's own when not set.")
    max_rooms: int = Field(default=1024, ge=1, le=65536, description="Rooms that may be open at once; one more is refused.")
    max_running: int = Field(default=64, ge=1, description="Most sequences of one decode step.")
    max_batched_tokens: int = Field(default=1024, ge=1, description="Most tokens of one step, prompt chunks and answers together.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of the engine's arithmetic; torch's default when not set.")
    stall_limit_s: float = Field(default=30.0, gt=0, description="Seconds without progress, while there is work, after which health is NOT_SERVING.")

    def served_name(self) -> str:
        return self.model_name or self.model_path.resolve().name

    def engine_config(self) -> EngineConfig:
        """For the engine. Raises the engine's InvalidSettingError."""
        return EngineConfig(
            num_pages=self.num_pages,
            kv_bytes=None if self.num_pages is not None else self.kv_bytes,
            page_size=self.page_size,
            max_num_batched_tokens=self.max_batched_tokens,
            max_running=self.max_running,
            max_model_len=self.max_model_len,
            dtype=self.dtype,
            num_threads=self.threads,
        )


class TransferSettings(SettingsGroup):
    """How KV pages travel."""

    transport: Literal["auto", "shm", "tcp"] = Field(
        default="auto", description="Path of KV pages; auto: shared memory on one host, else the best network."
    )
    expected_transport: str = Field(default="", description="What the chosen path must contain (sysv, rc, cuda_ipc, ...), else a pair is refused.")
    transfer_queues: int = Field(default=4, ge=1, le=64, description="Native threads that send KV pages.")

    @model_validator(mode="after")
    def _check_expected(self) -> TransferSettings:
        if self.transport == "tcp" and self.expected_transport and "tcp" not in self.expected_transport:
            raise ValueError(f"--expected-transport={self.expected_transport!r} cannot be met with --transport=tcp")
        return self
