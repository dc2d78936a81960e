"""What the kernels compute, written as plainly as torch allows: the reference of their tests and of the engine's."""

from __future__ import annotations

from baton.kernels.naive.activation import naive_silu_mul
from baton.kernels.naive.attention import naive_decode_attention, naive_fresh_attention, naive_prefill_attention
from baton.kernels.naive.digest import naive_page_digest
from baton.kernels.naive.experts import naive_grouped_linear, naive_moe_combine, naive_moe_route
from baton.kernels.naive.linear import naive_linear_few, naive_linear_few_norm, naive_linear_invariant
from baton.kernels.naive.norm import naive_add_rms_norm, naive_rms_norm
from baton.kernels.naive.pages import naive_gather_heads, naive_gather_pages, naive_scatter_heads, naive_scatter_pages
from baton.kernels.naive.rope import naive_rope_and_write
from baton.kernels.naive.sampling import naive_arrivals, naive_draw_key, naive_sample
from baton.kernels.naive.seats import naive_seat_drawn, naive_seat_rows

__all__ = [
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
]
