"""Kernels of Baton. Importing this package does not import Triton: a kernel's module does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.kernels.naive import naive_decode_attention

if TYPE_CHECKING:
    from baton.kernels.decode import decode_attention

__all__ = ["decode_attention", "naive_decode_attention"]


def __getattr__(name: str) -> Any:
    if name == "decode_attention":
        from baton.kernels.decode import decode_attention

        return decode_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
