"""How one engine is set up, and the shape of the KV pool that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.errors import InvalidSettingError
from baton.engine.layout import KVLayout
from baton.engine.model_config import ModelConfig

ITEMSIZES = {"float32": 4, "bfloat16": 2}

#: More than one host has processors; OpenMP ends the process when it cannot start as many threads as it was told to.
MOST_THREADS = 4096


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Checked when it is made; a wrong value raises `InvalidSettingError`, which names the field, the value and the limit.

    num_pages or kv_bytes: size of the KV pool; one of them at most, and neither only until `prepare` has settled it.
    page_size: tokens of one page.
    max_num_batched_tokens: most tokens (prompt chunks and decode rows together) of one step.
    max_running: most sequences that decode in one step.
    mixed_prompt_tokens: most tokens of prompts in a step that also decodes: bounds how long each of them makes the answers wait. None: no other
    bound than max_num_batched_tokens.
    max_model_len: longest prompt + answer; None: what the model takes. Never more than the pool holds.
    dtype: of the weights and of the pool: float32 or bfloat16.
    num_threads: torch's threads inside one operation, for the whole process; None leaves them as they are.
    deterministic: on a GPU, results of a request do not depend on what else is in the batch; slower. (On a CPU it is ignored.)
    cuda_graphs: on a GPU, decode steps and chunks of up to 1,024 tokens are captured once and replayed.
    prefix_cache: whole pages of prompts and answers stay until others need them, and are not computed (decode: not moved) again. Servers turn it
    on (--prefix-cache); an engine that is asked for nothing keeps nothing.
    growth_tokens: room kept for each admitted sequence's answer before another sequence is let in.
    max_passes: how many smaller requests may be let in before one that does not fit yet.
    """

    num_pages: int | None = None
    kv_bytes: int | None = None
    page_size: int = 16
    max_num_batched_tokens: int = 1024
    max_running: int = 64
    mixed_prompt_tokens: int | None = None
    max_model_len: int | None = None
    dtype: str = "float32"
    num_threads: int | None = None
    growth_tokens: int = 64
    max_passes: int = 16
    deterministic: bool = False
    cuda_graphs: bool = True
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        if self.num_pages is not None and self.kv_bytes is not None:
            raise InvalidSettingError("num_pages, kv_bytes", (self.num_pages, self.kv_bytes), "set one of the two, not both")
        if self.dtype not in ITEMSIZES:
            raise InvalidSettingError("dtype", self.dtype, f"must be one of {', '.join(ITEMSIZES)}")
        positive = ("num_pages", "kv_bytes", "page_size", "max_num_batched_tokens", "max_running", "max_model_len", "num_threads")
        for field in (*positive, "mixed_prompt_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidSettingError(field, value, "must be at least 1")
        if self.num_threads is not None and self.num_threads > MOST_THREADS:
            raise InvalidSettingError("num_threads", self.num_threads, f"must be at most {MOST_THREADS}")
        for field in ("growth_tokens", "max_passes"):
            if getattr(self, field) < 0:
                raise InvalidSettingError(field, getattr(self, field), "must be at least 0")
        if self.max_running > self.max_num_batched_tokens:
            limit = f"must not be above max_num_batched_tokens ({self.max_num_batched_tokens}): each running sequence takes a token of the step"
            raise InvalidSettingError("max_running", self.max_running, limit)


def plan_layout(model: ModelConfig, config: EngineConfig) -> KVLayout:
    """The pool's shape, before any memory exists: allocate `layout.pool_bytes` and hand the buffer to `Engine`.

    Raises InvalidSettingError when kv_bytes does not hold even one page of every layer.
    """
    shape = KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
        num_pages=config.num_pages or 1,
        itemsize=ITEMSIZES[config.dtype],
    )
    if config.kv_bytes is None:
        if config.num_pages is None:
            raise InvalidSettingError("num_pages, kv_bytes", (None, None), "one of the two must be set")
        return shape
    num_pages = config.kv_bytes // shape.pool_bytes
    if num_pages < 1:
        raise InvalidSettingError("kv_bytes", config.kv_bytes, f"one page of all layers takes {shape.pool_bytes} bytes; give at least that")
    return KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.page_size, num_pages, shape.itemsize)


def max_model_len(model: ModelConfig, config: EngineConfig) -> int:
    """Longest prompt + answer in tokens: the least of the model's context, the setting and what the pool holds."""
    layout = plan_layout(model, config)
    limit = min(model.max_model_len, layout.num_pages * layout.page_size)
    return limit if config.max_model_len is None else min(limit, config.max_model_len)
