"""Whether a model, its KV pool and a step's workspace fit, as arithmetic: asked before anything is allocated and before a port is opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.engine.config import ITEMSIZES, EngineConfig, plan_layout
from baton.engine.errors import InsufficientMemoryError
from baton.engine.inventory import Split, TensorSpec, inventory
from baton.engine.model_config import ModelConfig
from baton.engine.types import Role

#: Bytes for each logit of a step: the product, float32, scaled and exponentiated copies, bins of a histogram as float32 and int64.
_BYTES_PER_LOGIT = 28

#: What an interpreter with torch takes before the first tensor, seen on the CPU.
_CPU_RUNTIME_BYTES = 400 << 20


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that one engine will take. tables: the rotations of every position. workspace: a step's activations and logits, an estimate
    from above for plain arithmetic without sharing of buffers."""

    weights: int
    kv_pool: int
    tables: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_pool + self.tables + self.workspace


def weight_bytes(config: ModelConfig, itemsize: int, degree: int = 1) -> int:
    """One copy of every tensor that one rank of `degree` holds."""
    return sum(_share(spec, degree) for spec in inventory(config)) * itemsize


def cpu_weight_bytes(config: ModelConfig, dtype: str, role: Role, degree: int = 1) -> int:
    """As `models.llama` holds them. float32: the head has a packed copy of its own, also of tied embeddings, and in the prefill and plain
    roles the dense layers' matrices are held in both layouts. bfloat16: once."""
    once = weight_bytes(config, ITEMSIZES[dtype], degree)
    if dtype != "float32":
        return once
    head = config.vocab_size * config.hidden_size // degree * ITEMSIZES[dtype] if config.tie_embeddings else 0
    twice = 0 if role is Role.DECODE else sum(_share(spec, degree) for spec in _dense_matrices(config)) * ITEMSIZES[dtype]
    return once + head + twice


def table_bytes(config: ModelConfig) -> int:
    """complex64 for each position and pair of dimensions."""
    return config.max_model_len * config.head_dim // 2 * 8


def workspace_bytes(config: ModelConfig, itemsize: int, num_rows: int, num_samples: int, degree: int = 1) -> int:
    """Of one step with `num_rows` tokens of which `num_samples` get logits: the widest layer's intermediate results, all alive at once."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim // degree
    widest = 0
    if not all(config.is_sparse(layer) for layer in range(config.num_layers)):
        widest = 3 * config.intermediate_size // degree * itemsize
    if config.moe is not None:
        moe = config.moe
        # Each row once for every expert it goes to: gathered, gate and up and their product, the output, and that in float32 and in order.
        copies = (2 * config.hidden_size + 3 * moe.intermediate_size // degree) * itemsize + 2 * config.hidden_size * 4
        widest = max(widest, moe.experts_per_token * copies + moe.num_experts * 8)
    # The residual, its norm, and the norm's float32 product.
    per_row = 2 * config.hidden_size * itemsize + config.hidden_size * 4 + heads * itemsize + widest
    return num_rows * per_row + num_samples * config.vocab_size * _BYTES_PER_LOGIT


def cpu_need(model: ModelConfig, config: EngineConfig, role: Role, degree: int = 1) -> MemoryNeed:
    """What an engine of `degree` ranks on one CPU takes, all ranks together. Raises InvalidSettingError as `plan_layout` does."""
    return MemoryNeed(
        weights=cpu_weight_bytes(model, config.dtype, role, degree) * degree + _CPU_RUNTIME_BYTES,
        kv_pool=plan_layout(model, config).pool_bytes,
        tables=table_bytes(model) * degree,
        workspace=workspace_bytes(model, ITEMSIZES[config.dtype], config.max_num_batched_tokens, _num_samples(config), degree) * degree,
    )


def device_need(model: ModelConfig, config: EngineConfig, degree: int = 1) -> MemoryNeed:
    """What one of `degree` devices takes, without captured graphs. The KV pool is divided too: every rank has its share of the KV heads. A decode
    step's logits are kept behind it."""
    kept = config.max_running * model.vocab_size * ITEMSIZES[config.dtype]
    return MemoryNeed(
        weights=weight_bytes(model, ITEMSIZES[config.dtype], degree),
        kv_pool=plan_layout(model, config).pool_bytes // degree,
        tables=table_bytes(model),
        workspace=workspace_bytes(model, ITEMSIZES[config.dtype], config.max_num_batched_tokens, _num_samples(config), degree) + kept,
    )


def require_memory(need: MemoryNeed, free_bytes: int, place: str, page_bytes: int, degree: int = 1, file: Path | None = None) -> None:
    """Raises InsufficientMemoryError when `need` is more than `free_bytes`.

    place: what is short ("cpu", "cuda:0"). page_bytes: of one page over all layers, the least that a pool can be. degree: devices that the pool
    is divided among, of which `place` is one: `need` is its share, settings and page_bytes are of the whole. file: the config.json that the sizes
    are of, named where no setting is to blame.
    """
    if need.total <= free_bytes:
        return
    parts = (
        f"weights {_shown(need.weights)} + KV pool {_shown(need.kv_pool)} + rotation table {_shown(need.tables)} "
        f"+ workspace of a step {_shown(need.workspace)} = {_shown(need.total)}"
    )
    room = (free_bytes - (need.total - need.kv_pool)) * degree
    if room >= page_bytes:
        remedy = f"lower kv_bytes to at most {room}, or num_pages to at most {room // page_bytes}"
    elif need.weights + need.tables + page_bytes // degree <= free_bytes:
        remedy = "lower max_num_batched_tokens and max_running, then kv_bytes or num_pages"
    else:
        model = "" if file is None else f" (its sizes are those in {file})"
        remedy = f"the weights alone do not leave room for a page: a smaller dtype, a smaller model{model} or more memory is needed"
    raise InsufficientMemoryError(f"memory of {place}: {parts}, but {_shown(free_bytes)} are free; {remedy}")


def cpu_free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still take: the machine's available memory, or what its control group leaves of a limit, whichever is less."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            group = cgroups / path.lstrip("/")
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            group = cgroups / "memory" / path.lstrip("/")
        else:
            continue
        # A group's limit binds all below it. Inside a container the path may be the host's: the mount's own root is then the group.
        for folder in (group, *group.parents):
            free = min(free, _group_room(folder, *names))
            if folder == cgroups:
                break
    return free


def _group_room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int:
    unlimited = 1 << 62
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        usage = int((folder / usage_name).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return unlimited
    # Cached file pages count as used but are given up when memory is wanted, as MemAvailable says of the machine's.
    return unlimited if limit == "max" else max(0, int(limit) - usage + int(stat.get(cache_name, 0)))


def _num_samples(config: EngineConfig) -> int:
    # Every running sequence, and prompts that end in the same step: no more of those than there are tokens left.
    return min(config.max_num_batched_tokens, 2 * config.max_running)


def _dense_matrices(config: ModelConfig) -> Iterable[TensorSpec]:
    experts = "" if config.moe is None else f"{config.moe.names.block}.experts."
    router = "" if config.moe is None else f"{config.moe.names.router}."
    for spec in inventory(config):
        inside = spec.name.startswith("model.layers.") and len(spec.shape) == 2
        if inside and not (experts and (experts in spec.name or router in spec.name)):
            yield spec


def _share(spec: TensorSpec, degree: int) -> int:
    return spec.num_elements // degree if spec.split in (Split.ROWS, Split.COLUMNS) else spec.num_elements


def _shown(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes" if num_bytes < 1 << 20 else f"{num_bytes / 1e9:.3f} GB"
