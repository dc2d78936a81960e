"""Groups of settings that prefill and decode servers share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from baton.engine import Fingerprint, Role, fingerprint
from baton.engine.config import EngineConfig
from baton.engine.progress import ProgressLog
from baton.servicekit import SettingsGroup, get_logger

if TYPE_CHECKING:
    from baton.engine import Prepared


log = get_logger(__name__)


class EngineSettings(SettingsGroup):
    """The model, its KV pool, and how much runs at once."""

    model_path: Path = Field(description="Folder of the model in Hugging Face's format: config.json and *.safetensors.")
    model_name: str | None = Field(default=None, min_length=1, description="Name of the model for clients; the folder's name when not set.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Numbers of weights, activations and KV pages.")
    page_size: int = Field(default=16, ge=1, le=1024, description="Tokens of one KV page; equal on all servers of a fleet.")
    num_pages: int | None = Field(default=None, ge=1, description="Pages of the KV pool; as many as --kv-bytes holds when not set.")
    kv_bytes: int | None = Field(
        default=None, ge=1, description="Bytes of the KV pool when --num-pages is not set; when neither is: 1 GiB on a CPU, what is free on a GPU."
    )
    device: str = Field(default="cpu", description="Where the model runs: cpu or cuda:N.")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="Ranks that share the model: GPUs from --device on, or threads of a CPU; must divide its KV heads."
    )
    memory_fraction: float = Field(default=0.9, gt=0, le=1, description="Part of a GPU's memory that this server and others before it may fill.")
    load_format: Literal["auto", "dummy"] = Field(default="auto", description="auto: the folder's weights; dummy: random ones, for measuring.")
    deterministic: bool = Field(default=False, description="On a GPU, answers do not depend on what else is in the batch; slower.")
    cuda_graphs: bool = Field(default=True, description="On a GPU, decode steps and chunks of up to 1,024 tokens are captured once and replayed.")
    prefix_cache: bool = Field(
        default=True, description="Whole pages of prompts and answers stay until others need them: not computed (decode: not moved) again."
    )
    max_model_len: int | None = Field(default=None, ge=2, description="Longest prompt and answer together, in tokens; the model's own when not set.")
    max_rooms: int = Field(default=1024, ge=1, le=65536, description="Rooms that may be open at once; one more is refused.")
    max_running: int = Field(default=64, ge=1, description="Most sequences of one decode step.")
    max_batched_tokens: int = Field(default=1024, ge=1, description="Most tokens of one step, prompt chunks and answers together.")
    threads: int | None = Field(default=None, ge=1, le=4096, description="CPU threads of the engine's arithmetic; torch's default when not set.")
    stall_limit_s: float = Field(default=30.0, gt=0, description="Seconds without progress, while there is work, after which health is NOT_SERVING.")

    def served_name(self) -> str:
        return self.model_name or self.model_path.resolve().name

    def transfer_devices(self) -> list[str]:
        """The GPU of each rank, as the transfer library names it; empty texts on a CPU."""
        first = self.device.partition("cuda:")[2]
        return [str(int(first) + rank) if first else "" for rank in range(self.tensor_parallel)]

    def prepare(self, role: Role, mixed_prompt_tokens: int | None = None) -> Prepared:
        """Loads the model and settles the KV pool's size. Blocks for seconds; raises the engine's errors."""
        from baton.engine import prepare  # torch takes seconds to import: --help and a bad setting need not wait for it

        return prepare(
            self.model_path,
            self.engine_config(mixed_prompt_tokens),
            role,
            device=self.device,
            load_format=self.load_format,
            memory_fraction=self.memory_fraction,
            progress=ProgressLog(log.info),
            tensor_parallel=self.tensor_parallel,
        )

    def fingerprint(self, prepared: Prepared) -> Fingerprint:
        return fingerprint(self.model_path, self.served_name(), prepared.model.config, prepared.config, self.load_format)

    def engine_config(self, mixed_prompt_tokens: int | None = None) -> EngineConfig:
        """For the engine. Raises the engine's InvalidSettingError."""
        return EngineConfig(
            num_pages=self.num_pages,
            kv_bytes=None if self.num_pages is not None else self.kv_bytes,
            page_size=self.page_size,
            max_num_batched_tokens=self.max_batched_tokens,
            max_running=self.max_running,
            mixed_prompt_tokens=mixed_prompt_tokens,
            max_model_len=self.max_model_len,
            dtype=self.dtype,
            num_threads=self.threads,
            deterministic=self.deterministic,
            cuda_graphs=self.cuda_graphs,
            prefix_cache=self.prefix_cache,
        )


class SglangSettings(SettingsGroup):
    """A second port for gateways that speak SGLang's scheduler contract; off by default."""

    prefix: ClassVar[str] = "sglang_"
    port: int | None = Field(
        default=None, ge=0, le=65535, description="Port for gateways that speak SGLang's scheduler contract; 0: the system chooses; off when not set."
    )
    timeout_s: float = Field(
        default=300.0, gt=0, description="Seconds that a request over --sglang-port may wait for its other half, and then for its first KV page."
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
