"""Every kernel beside its floor: the bytes it must move over the copy bandwidth, or its products over the matrix rate, of the same run.

    python benchmarks/gpu/kernels.py [--only WORD] [--sweep [--rows N ...]] [--dry]

First each kernel's result is compared with its naive twin's, then it is timed with a cold second-level cache. One JSON line a case: `ratio` is
the floor over our time (1 is the floor itself), `target` what the ratio must reach, `beside` what else was timed on the same numbers (ms).
A product of few rows, launched alone, is held against the library's on the same numbers instead (`over_rival`); those of some layers in a row,
which overlap as in a captured step, against the floor. --sweep tries tilings of the kernels that have some and prints the best of each. --dry
runs every line of this on a CPU, in Triton's interpreter, with tiny shapes: its times mean nothing. The exit status is 1 when a result is wrong
or a target missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from kernel_timing import DEVICE, DRY, DTYPE, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, VOCABULARY, Paged, measured_rates, milliseconds, random, sized
from torch import Tensor
from torch.nn.functional import linear

import baton.kernels as bk

#: Far above what rounding to bfloat16 does, far below what a wrong index does.
TOLERANCE = 0.03


@dataclass
class Case:
    """run: what is timed. check: (ours, expected). num_bytes, num_operations: of which the floor is the larger. rival: the name in `beside` that
    the target is over, instead of the floor."""

    name: str
    shape: str
    run: Callable[[], Any]
    check: Callable[[], tuple[Any, Any]]
    num_bytes: float = 0.0
    num_operations: float = 0.0
    target: float | None = None
    beside: dict[str, Callable[[], Any]] = field(default_factory=dict)
    rival: str | None = None


def decode_cases() -> Iterator[Case]:
    for batch, length, page_size in ((32, 8192, 16), (32, 8192, 64), (32, 8192, 128), (1, 2048, 64), (16, 2048, 64), (64, 2048, 64)):
        batch, length = sized(batch, 2), sized(length, 70)
        paged, query = Paged(batch, length, page_size), random(batch, HEADS, HEAD_DIM)
        arguments = (query, paged.keys, paged.values, paged.table, paged.lengths)
        yield Case(
            "decode_attention",
            f"{batch} x {length}, pages of {page_size}",
            lambda arguments=arguments: bk.decode_attention(*arguments),
            lambda arguments=arguments: (bk.decode_attention(*arguments), bk.naive_decode_attention(*arguments)),
            num_bytes=paged.num_bytes,
            target=0.85 if batch == 32 else None,
            beside={"fixed shares": lambda arguments=arguments: bk.decode_attention(*arguments, split_tokens=512)},
        )


def prefill_cases() -> Iterator[Case]:
    for length, queries in ((8192, 8192), (8192, 2048)):
        length, queries = sized(length, 80), sized(queries, 80 if queries == length else 20)
        paged, qkv = Paged(1, length, 64), random(queries, HEADS + 2 * KV_HEADS, HEAD_DIM)
        query = qkv[:, :HEADS]
        starts = torch.tensor([0, queries], dtype=torch.int32, device=DEVICE)
        arguments = (query, paged.keys, paged.values, paged.table, starts, paged.lengths, queries)
        # The twin holds all scores at once: it sees the last queries only.
        last = min(queries, 512)
        few = torch.tensor([0, last], dtype=torch.int32, device=DEVICE)
        yield Case(
            "prefill_attention",
            f"the last {queries} of {length}, pages of 64",
            lambda arguments=arguments: bk.prefill_attention(*arguments),
            lambda arguments=arguments, last=last, few=few: (
                bk.prefill_attention(*arguments)[-last:],
                bk.naive_prefill_attention(arguments[0][-last:], *arguments[1:4], few, arguments[5], last),
            ),
            num_operations=4.0 * HEADS * HEAD_DIM * queries * (length - (queries - 1) / 2),
        )
    length = sized(8192, 40)
    qkv = random(length, HEADS + 2 * KV_HEADS, HEAD_DIM)
    parts = (qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :])
    short = sized(1024, 40)
    yield Case(
        "fresh_attention",
        f"{length}, on {{backend}}",
        lambda: bk.fresh_attention(*parts, [0, length]),
        lambda: tuple(function(*(each[:short] for each in parts), [0, short]) for function in (bk.fresh_attention, bk.naive_fresh_attention)),
        num_operations=2.0 * HEADS * HEAD_DIM * length * (length + 1),
        target=0.6,
        beside=backends(parts) if not DRY else {},
    )


def backends(parts: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], Any]]:
    """torch's own, each by name, heads grouped and expanded."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(backend: SDPBackend, grouped: bool) -> Tensor:
        query, keys, values = (each.transpose(0, 1).unsqueeze(0) for each in parts)
        if not grouped:
            keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (keys, values))
        with sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=grouped)

    return {
        f"{backend.name}{'' if grouped else ', expanded'}": lambda backend=backend, grouped=grouped: attend(backend, grouped)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
        for grouped in (True, False)
    }


def linear_cases() -> Iterator[Case]:
    products: list[tuple[str, int, int, dict[str, Any]]] = [
        ("qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, {}),
        ("o", HIDDEN, HEADS * HEAD_DIM, {}),
        ("gate_up + gate", 2 * MLP, HIDDEN, {"silu_mul": True}),
        ("gate_up", 2 * MLP, HIDDEN, {}),
        ("down", HIDDEN, MLP, {}),
        ("lm_head", VOCABULARY, HIDDEN, {}),
    ]
    for name, width, depth, options in products:
        weight = random(width, depth, scale=depth**-0.5)
        for rows in (1, 16, 64):
            x = random(rows, depth)
            yield Case(
                "linear_few",
                f"{name}, {rows} x {depth} -> {width}",
                lambda x=x, weight=weight, options=options: bk.linear_few(x, weight, **options),
                lambda x=x, weight=weight, options=options: (bk.linear_few(x, weight, **options), bk.naive_linear_few(x, weight, **options)),
                num_bytes=(weight.numel() + x.numel() + rows * width) * DTYPE.itemsize,
                target=0.95,
                rival="cuBLAS",
                beside={
                    "cuBLAS": lambda x=x, weight=weight: linear(x, weight),
                    "linear_invariant": lambda x=x, weight=weight: bk.linear_invariant(x, weight),
                },
            )
    yield from chained_cases()
    x, weight = random(sized(8192, 70), HIDDEN), random(2 * MLP, HIDDEN, scale=HIDDEN**-0.5)
    yield Case(
        "linear_invariant",
        f"{len(x)} x {HIDDEN} -> {2 * MLP}",
        lambda: bk.linear_invariant(x, weight),
        lambda: (bk.linear_invariant(x, weight), bk.naive_linear_invariant(x, weight)),
        num_operations=2.0 * x.numel() * 2 * MLP,
        beside={"cuBLAS": lambda: linear(x, weight)},
    )


def chained_cases() -> Iterator[Case]:
    """The products of some layers as a captured step launches them: one may be set up while the one before it drains."""
    shapes = (((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * MLP, HIDDEN), (HIDDEN, MLP))
    layers = [[random(width, depth, scale=depth**-0.5) for width, depth in shapes] for _ in range(sized(4, 1))]
    num_bytes = float(sum(weight.numel() for layer in layers for weight in layer) * DTYPE.itemsize)
    chained = nullcontext if DRY else bk.chain_launches
    for rows in (1, 16, 64):
        x = random(rows, HIDDEN)

        def few(x: Tensor = x) -> Tensor:
            with chained():
                for qkv, o, gate_up, down in layers:
                    x = bk.linear_few(bk.linear_few(x, qkv)[:, : HEADS * HEAD_DIM].contiguous(), o)
                    x = bk.linear_few(bk.linear_few(x, gate_up, silu_mul=True), down)
            return x

        def naive(x: Tensor = x) -> Tensor:
            for qkv, o, gate_up, down in layers:
                x = linear(linear(x, qkv)[:, : HEADS * HEAD_DIM].contiguous(), o)
                x = linear(bk.naive_silu_mul(linear(x, gate_up)), down)
            return x

        yield Case(
            "linear_few in a row",
            f"the products of {len(layers)} layers, {rows} rows",
            few,
            lambda few=few, naive=naive: (few(), naive()),
            num_bytes=num_bytes,
            target=0.85,
            beside={"cuBLAS": naive},
        )


def row_cases() -> Iterator[Case]:
    for rows in (64, 8192):
        rows = sized(rows, 3)
        x, residual, weight = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN)
        gate_up, qkv = random(rows, 2 * MLP), random(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        paged = Paged(1, max(rows, 128), 64)
        angles = torch.rand(rows, HEAD_DIM // 2, device=DEVICE)
        turns = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
        order = torch.randperm(rows, device=DEVICE)
        norms = (random(HEAD_DIM), random(HEAD_DIM))
        heads = (HEADS, KV_HEADS, *norms, 1e-6)

        def rope(function: Any, qkv: Tensor = qkv, order: Tensor = order, turns: Tensor = turns, paged: Paged = paged, heads: Any = heads) -> Tensor:
            rotated = qkv.clone()
            function(rotated, order, order, turns, paged.keys, paged.values, *heads)
            return rotated

        size = rows * DTYPE.itemsize
        yield Case(
            "rms_norm",
            f"{rows} x {HIDDEN}",
            lambda x=x, weight=weight: bk.rms_norm(x, weight, 1e-6),
            lambda x=x, weight=weight: (bk.rms_norm(x, weight, 1e-6), bk.naive_rms_norm(x, weight, 1e-6)),
            num_bytes=2.0 * HIDDEN * size,
        )
        yield Case(
            "add_rms_norm",
            f"{rows} x {HIDDEN}",
            lambda x=x, residual=residual, weight=weight: bk.add_rms_norm(x, residual, weight, 1e-6),
            lambda x=x, residual=residual, weight=weight: tuple(
                function(x, residual.clone(), weight, 1e-6) for function in (bk.add_rms_norm, bk.naive_add_rms_norm)
            ),
            num_bytes=4.0 * HIDDEN * size,
        )
        yield Case(
            "silu_mul",
            f"{rows} x {2 * MLP}",
            lambda gate_up=gate_up: bk.silu_mul(gate_up),
            lambda gate_up=gate_up: (bk.silu_mul(gate_up), bk.naive_silu_mul(gate_up)),
            num_bytes=3.0 * MLP * size,
        )
        yield Case(
            "rope_and_write",
            f"{rows} rows",
            lambda qkv=qkv, order=order, turns=turns, paged=paged, heads=heads: bk.rope_and_write(
                qkv, order, order, turns, paged.keys, paged.values, *heads
            ),
            lambda rope=rope: (rope(bk.rope_and_write), rope(bk.naive_rope_and_write)),
            num_bytes=(2.0 * HEADS + 5.0 * KV_HEADS) * HEAD_DIM * size + turns.numel() * 4,
        )


def sampling_cases() -> Iterator[Case]:
    for rows in (1, 64):
        rows = sized(rows, 2)
        logits = random(rows, VOCABULARY, dtype=torch.float32, scale=3.0)
        numbers = torch.arange(rows, device=DEVICE)
        for name, heat, top_k, top_p in (("greedy", 0.0, 0, 1.0), ("temperature", 1.0, 0, 1.0), ("top_k 50, top_p 0.9", 1.0, 50, 0.9)):
            kind = [torch.full((rows,), value, dtype=torch.float32, device=DEVICE) for value in (heat, top_p, 0.0)]
            most = torch.full((rows,), top_k, dtype=torch.int32, device=DEVICE)
            arguments = (logits, kind[0], most, kind[1], kind[2], numbers, numbers)
            yield Case(
                "sample",
                f"{rows} x {VOCABULARY}, {name}",
                lambda arguments=arguments: bk.sample(*arguments),
                lambda arguments=arguments: (bk.sample(*arguments), bk.naive_sample(*arguments)),
                num_bytes=4.0 * logits.numel(),
            )


def page_cases() -> Iterator[Case]:
    pages = sized(4096, 5)
    pool = random(2 * pages, 16, KV_HEADS, HEAD_DIM)
    flat, index = pool.flatten(1), torch.randperm(2 * pages, device=DEVICE)[:pages].to(torch.int32)
    packed, half = flat[:pages].clone(), KV_HEADS // 2
    raw = pool.flatten(2).view(torch.uint8).unsqueeze(0)
    size = float(packed.numel() * DTYPE.itemsize)

    def scattered(function: Any) -> Tensor:
        target = torch.zeros_like(flat)
        function(target, index, packed)
        return target

    state = torch.zeros(1 + pages, dtype=torch.int64, device=DEVICE)

    def digested(function: Any) -> Tensor:
        fresh = torch.zeros_like(state)
        function(raw, index, fresh, range(1), range(pages))
        return fresh

    yield Case(
        "gather_pages",
        f"{pages} pages",
        lambda: bk.gather_pages(flat, index),
        lambda: (bk.gather_pages(flat, index), bk.naive_gather_pages(flat, index)),
        num_bytes=2 * size,
    )
    yield Case(
        "scatter_pages",
        f"{pages} pages",
        lambda: bk.scatter_pages(flat, index, packed),
        lambda: (scattered(bk.scatter_pages), scattered(bk.naive_scatter_pages)),
        num_bytes=2 * size,
    )
    yield Case(
        "gather_heads",
        f"{half} of {KV_HEADS} heads of {pages} pages",
        lambda: bk.gather_heads(pool, index, half, half),
        lambda: (bk.gather_heads(pool, index, half, half), bk.naive_gather_heads(pool, index, half, half)),
        num_bytes=size,
    )
    yield Case(
        "page_digest",
        f"{pages} pages",
        lambda: bk.page_digest(raw, index, state, range(1), range(pages)),
        lambda: (digested(bk.page_digest), digested(bk.naive_page_digest)),
        num_bytes=size,
    )


def expert_cases() -> Iterator[Case]:
    """Qwen3-30B-A3B's: 128 experts of 768, 8 a token."""
    experts, width, hidden, top_k = (8, 48, 64, 2) if DRY else (128, 768, 2048, 8)
    weight = random(experts, 2 * width, hidden, scale=hidden**-0.5)
    for tokens in (16, 4096):
        tokens = sized(tokens, 3)
        x, logits = random(tokens, hidden), random(tokens, experts)
        route = bk.moe_route(logits, top_k, True)
        used = int((route[3].diff() > 0).sum())
        yield Case(
            "moe_route",
            f"{tokens} tokens, {top_k} of {experts}",
            lambda logits=logits: bk.moe_route(logits, top_k, True),
            lambda logits=logits: (bk.moe_route(logits, top_k, True)[2], bk.naive_moe_route(logits, top_k, True)[2]),
            num_bytes=float(logits.numel() * DTYPE.itemsize),
        )
        yield Case(
            "grouped_linear",
            f"{tokens} tokens, {top_k} of {experts} ({used} used), {hidden} -> {2 * width}",
            lambda x=x, route=route: bk.grouped_linear(x, weight, *route[2:]),
            lambda x=x, route=route: (bk.grouped_linear(x, weight, *route[2:]), bk.naive_grouped_linear(x, weight, *route[2:])),
            num_bytes=float((used * 2 * width * hidden + tokens * (hidden + top_k * 2 * width)) * DTYPE.itemsize),
            num_operations=2.0 * tokens * top_k * 2 * width * hidden,
        )


GROUPS = (decode_cases, prefill_cases, linear_cases, row_cases, sampling_cases, page_cases, expert_cases)


def agree(ours: Tensor, expected: Tensor) -> bool:
    if not ours.is_floating_point():
        # A drawn token may differ where the random number lies on an edge; an index may not, and one in a hundred wrong is never an edge.
        return bool((ours == expected).float().mean() >= 0.99)
    ours, expected = ours.float(), expected.float()
    return bool(ours.isfinite().all()) and bool((ours - expected).abs().max() <= TOLERANCE * expected.abs().max().clamp(min=1e-3))


def report(case: Case, copy: float, product: float) -> bool:
    """Prints the case. False when its result is wrong or its target missed."""
    correct = agree(*case.check())
    ours = milliseconds(case.run)
    floor = max(case.num_bytes / copy, case.num_operations / product) * 1000
    beside: dict[str, Any] = {}
    for name, run in case.beside.items():
        try:
            beside[name] = round(milliseconds(run), 4)
        except RuntimeError as refusal:
            beside[name] = str(refusal).splitlines()[0][:80]
    shape = case.shape
    if "{backend}" in shape:
        shape = shape.format(backend="the naive twin" if DRY else fresh_backend())
    line = {"kernel": case.name, "shape": shape, "ms": round(ours, 4), "floor_ms": round(floor, 4), "ratio": round(floor / ours, 3)}
    line |= {"bound": "bytes" if case.num_bytes / copy > case.num_operations / product else "products", "target": case.target}
    reached = floor / ours
    if case.rival is not None:
        theirs = beside[case.rival]
        reached = theirs / ours if isinstance(theirs, float) else 0.0
        line |= {"rival": case.rival, "over_rival": round(reached, 3)}
    met = None if case.target is None or DRY else reached >= case.target
    line |= {"met": met, "correct": correct, "beside": beside}
    print(json.dumps(line), flush=True)
    return correct and met is not False


def fresh_backend() -> str:
    from baton.kernels.device.fresh import fresh_backends

    return "; ".join(f"{kind}: {backend}" for kind, backend in fresh_backends().items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only kernels whose name has this in it")
    parser.add_argument("--sweep", action="store_true", help="try tilings and print the best, instead")
    parser.add_argument("--rows", type=int, nargs="+", default=[1] if DRY else [1, 16, 64], help="of the products of few rows that --sweep tries")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with tiny shapes")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, product = measured_rates()
    name = "a CPU, in the interpreter" if DRY else torch.cuda.get_device_name()
    print(json.dumps({"device": name, "copy_TB_s": round(copy / 1e12, 3), "product_TFLOP_s": round(product / 1e12, 1)}), flush=True)
    if options.sweep:
        from kernel_sweep import sweep

        sweep(options.only, copy, product, tuple(options.rows))
        return 0
    good, seen = True, set()
    for group in GROUPS:
        # Cases hold gigabytes: one at a time.
        for case in group():
            # Tiny shapes may be the same.
            if options.only in case.name and (case.name, case.shape) not in seen:
                seen.add((case.name, case.shape))
                good = report(case, copy, product) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
