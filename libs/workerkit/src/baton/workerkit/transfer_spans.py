"""Spans of a room's transfer, made when it is over: from its first put until all were flushed, and its parts by queue and layers."""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context

from baton.engine.types import TransferStats


def trace_transfer(tracer: Tracer, room: Span, stats: TransferStats, at: float) -> None:
    """at: when it was over (time.monotonic(), seconds). Its parts are many: only a room that is sampled has them."""
    if not room.is_recording():
        return
    end_ns = time.time_ns() - round((time.monotonic() - at) * 1e9)
    begin_ns = end_ns - round(stats.duration_s * 1e9)
    span = tracer.start_span("transfer", context=set_span_in_context(room), start_time=begin_ns)
    span.set_attributes(
        {
            "baton.transport": stats.transport,
            "baton.bytes": stats.num_bytes,
            "baton.puts": stats.num_puts,
            "baton.busy_ms": round(stats.busy_s * 1e3, 3),
            "baton.exposed_ms": round(stats.exposed_s * 1e3, 3),
        }
    )
    if span.get_span_context().trace_flags.sampled:
        _trace_parts(tracer, set_span_in_context(span), stats, begin_ns)
    span.end(end_ns)


def _trace_parts(tracer: Tracer, transfer: Context, stats: TransferStats, begin_ns: int) -> None:
    for part in stats.parts:
        start_ns = begin_ns + round(part.begin_s * 1e9)
        span = tracer.start_span("transfer part", context=transfer, start_time=start_ns)
        span.set_attributes(
            {"baton.queue": part.queue, "baton.first_layer": part.first_layer, "baton.layers": part.num_layers, "baton.bytes": part.num_bytes}
        )
        span.end(start_ns + round(part.duration_s * 1e9))
