"""Legs that ended well, of rooms that may yet fail elsewhere: in a trace that is sent only if it failed, their spans are kept and wait for word."""

from __future__ import annotations

from collections import OrderedDict

from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Tracer, set_span_in_context

from baton.engine.types import Failure
from baton.servicekit import mark_failed

#: As many as traces whose spans are kept; the oldest goes first.
MAX_LEGS = 512


class EndedLegs:
    """By room. Of traces that are sampled, or of which nothing is recorded, nothing is kept here."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: OrderedDict[int, SpanContext] = OrderedDict()

    def add(self, room: int, span: Span) -> None:
        """A leg that ended well; before its span's end."""
        context = span.get_span_context()
        if not span.is_recording() or context.trace_flags.sampled:
            return
        self._spans[room] = context
        if len(self._spans) > MAX_LEGS:
            self._spans.popitem(last=False)

    def failed(self, room: int, failure: Failure) -> bool:
        """The room has failed after its leg here was over: what is kept of its trace is sent, with a span that says why. False: no such leg."""
        context = self._spans.pop(room, None)
        if context is None:
            return False
        if failure.origin != "client":
            span = self._tracer.start_span("room failed elsewhere", context=set_span_in_context(NonRecordingSpan(context)))
            span.set_attributes({"baton.room": str(room), "baton.origin": failure.origin, "baton.cause": failure.cause})
            mark_failed(span)
            span.end()
        return True
