"""Which side of a kernel runs, and refusals of what it cannot take."""

from __future__ import annotations

import os

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def runs_triton(tensor: Tensor) -> bool:
    """CUDA tensors go to Triton; CPU tensors to the naive twin, unless Triton's interpreter is on (TRITON_INTERPRET=1, Triton's own switch)."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | tuple[torch.dtype, ...]) -> None:
    """Refuses a tensor that has another shape (-1: any number) or dtype."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.ndim != len(shape) or any(wanted not in (-1, got) for wanted, got in zip(shape, tensor.shape, strict=True)):
        wanted_shape = "[" + ", ".join("any" if each == -1 else str(each) for each in shape) + "]"
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {wanted_shape}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(str(each) for each in dtypes)}")


def expect_dense(name: str, tensor: Tensor, dims: int = 1) -> None:
    """Refuses a tensor whose last `dims` dimensions are not contiguous."""
    stride = 1
    for dim in range(tensor.ndim - 1, tensor.ndim - 1 - dims, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != stride:
            raise ValueError(f"{name} has strides {list(tensor.stride())}; its last {dims} dimension(s) must be contiguous")
        stride *= tensor.shape[dim]


def expect_pages(keys: Tensor, values: Tensor, head_dim: int) -> None:
    """keys, values [pages, page size, kv heads, head dim] of equal strides; the page size a power of two."""
    expect("keys", keys, (-1, -1, -1, head_dim), FLOATS)
    expect("values", values, tuple(keys.shape), keys.dtype)
    if keys.stride() != values.stride():
        raise ValueError(f"keys have strides {list(keys.stride())}, values {list(values.stride())}; they must be the same")
    expect_dense("keys", keys)


def power_of_two(name: str, value: int, most: int) -> None:
    if value < 1 or value > most or value & (value - 1):
        raise ValueError(f"{name} = {value}; on a GPU it must be a power of two, at most {most}")


def at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ValueError(f"{name} = {value}; it must be at least {least}")
