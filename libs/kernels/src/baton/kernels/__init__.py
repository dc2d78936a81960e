"""Kernels of Baton. Importing this package imports torch but not Triton: a kernel's first launch does."""

from __future__ import annotations

from baton.kernels.activation import silu_mul
from baton.kernels.attention import decode_attention, fresh_attention, prefill_attention
from baton.kernels.chained import can_chain, chain_launches, is_chained
from baton.kernels.digest import page_digest, whole_digest
from baton.kernels.experts import grouped_linear, moe_combine, moe_route
from baton.kernels.linear import linear_few, linear_few_norm, linear_invariant
from baton.kernels.naive import (
    naive_add_rms_norm,
    naive_arrivals,
    naive_decode_attention,
    naive_draw_key,
    naive_fresh_attention,
    naive_gather_heads,
    naive_gather_pages,
    naive_grouped_linear,
    naive_linear_few,
    naive_linear_few_norm,
    naive_linear_invariant,
    naive_moe_combine,
    naive_moe_route,
    naive_page_digest,
    naive_prefill_attention,
    naive_rms_norm,
    naive_rope_and_write,
    naive_sample,
    naive_scatter_heads,
    naive_scatter_pages,
    naive_seat_drawn,
    naive_seat_rows,
    naive_silu_mul,
)
from baton.kernels.norm import add_rms_norm, rms_norm
from baton.kernels.pages import gather_heads, gather_pages, scatter_heads, scatter_pages
from baton.kernels.rope import rope_and_write
from baton.kernels.sampling import sample
from baton.kernels.seats import seat_drawn, seat_rows

__all__ = [
    "add_rms_norm",
    "can_chain",
    "chain_launches",
    "decode_attention",
    "fresh_attention",
    "gather_heads",
    "gather_pages",
    "grouped_linear",
    "is_chained",
    "linear_few",
    "linear_few_norm",
    "linear_invariant",
    "moe_combine",
    "moe_route",
    "naive_add_rms_norm",
    "naive_arrivals",
    "naive_decode_attention",
    "naive_draw_key",
    "naive_fresh_attention",
    "naive_gather_heads",
    "naive_gather_pages",
    "naive_grouped_linear",
    "naive_linear_few",
    "naive_linear_few_norm",
    "naive_linear_invariant",
    "naive_moe_combine",
    "naive_moe_route",
    "naive_page_digest",
    "naive_prefill_attention",
    "naive_rms_norm",
    "naive_rope_and_write",
    "naive_sample",
    "naive_scatter_heads",
    "naive_scatter_pages",
    "naive_seat_drawn",
    "naive_seat_rows",
    "naive_silu_mul",
    "page_digest",
    "prefill_attention",
    "rms_norm",
    "rope_and_write",
    "sample",
    "scatter_heads",
    "scatter_pages",
    "seat_drawn",
    "seat_rows",
    "silu_mul",
    "whole_digest",
]
