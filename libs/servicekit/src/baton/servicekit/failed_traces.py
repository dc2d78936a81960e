"""Traces of what failed, whatever the sampler said when it began.

Whether a request will fail is not known when its first span is made. So spans that the sampler does not want are recorded all the same
(RECORD_ONLY, which OpenTelemetry has for this), kept for a while, and exported if their trace turns out to have failed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

#: Of traces that have not failed so far: how many are kept, and how many spans of each. Those that ended first go first.
MAX_TRACES = 512
MAX_SPANS_OF_TRACE = 64
#: Traces that failed, of which more spans may come.
MAX_FAILED = 1024

_FAILED = "baton.failed"


def mark_failed(span: Span) -> None:
    """Something of this span's trace failed that somebody may want to look at: it is exported, though it may not be sampled. Before the span's end.

    An error alone is no reason: a client's mistake is one as well, and comes as often as clients like.
    """
    span.set_attribute(_FAILED, True)


class RecordAll(Sampler):
    """What `inner` would drop is recorded, and not sampled: nobody who is called is told to sample it, and only FailedTraces looks at it."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        result = self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if result.decision is Decision.DROP:
            return SamplingResult(Decision.RECORD_ONLY, result.attributes, result.trace_state)
        return result

    def get_description(self) -> str:
        return f"RecordAll{{{self._inner.get_description()}}}"


class FailedTraces(SpanProcessor):
    """Gives `exporting` the spans of failed traces that were not sampled, marked as sampled. Owns nothing; any thread may end spans.

    A trace has failed when one of its spans of this process was given to `mark_failed`. `num_dropped`: spans of traces that were too long to be
    kept whole.
    """

    def __init__(self, exporting: SpanProcessor) -> None:
        self._exporting = exporting
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, list[ReadableSpan]] = OrderedDict()
        self._failed: OrderedDict[int, None] = OrderedDict()
        self.num_dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is None or context.trace_flags.sampled:
            return
        with self._lock:
            wanted = self._take(context.trace_id, span)
        for one in wanted:
            self._exporting.on_end(_sampled(one))

    def _take(self, trace_id: int, span: ReadableSpan) -> list[ReadableSpan]:
        """Under the lock. Keeps the span, or returns what is to be exported now."""
        if trace_id in self._failed:
            return [span]
        if _has_failed(span):
            self._failed[trace_id] = None
            if len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
            return [*self._kept.pop(trace_id, ()), span]
        kept = self._kept.setdefault(trace_id, [])
        if len(kept) < MAX_SPANS_OF_TRACE:
            kept.append(span)
        else:
            self.num_dropped += 1
        if len(self._kept) > MAX_TRACES:
            self._kept.popitem(last=False)
        return []


def _has_failed(span: ReadableSpan) -> bool:
    return bool(span.attributes and span.attributes.get(_FAILED))


def _sampled(span: ReadableSpan) -> ReadableSpan:
    """The same span, as one that exporters take."""
    was = span.context
    assert was is not None
    return ReadableSpan(
        name=span.name,
        context=SpanContext(was.trace_id, was.span_id, was.is_remote, TraceFlags(was.trace_flags | TraceFlags.SAMPLED), was.trace_state),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
