"""What failed is traced although nobody chose its trace; nothing else is."""

from __future__ import annotations

import json

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from baton.servicekit import TraceSettings, configure_tracing, extract_traceparent, inject_traceparent, mark_failed
from baton.servicekit import failed_traces as kept
from baton.servicekit.failed_traces import FailedTraces, RecordAll


class Process:
    """A service's tracing, whose spans are exported into a list."""

    def __init__(self, sampler: Sampler) -> None:
        self.exporter = InMemorySpanExporter()
        exporting = SimpleSpanProcessor(self.exporter)
        self.failed = FailedTraces(exporting)
        provider = TracerProvider(sampler=RecordAll(sampler))
        provider.add_span_processor(exporting)
        provider.add_span_processor(self.failed)
        self.tracer = provider.get_tracer("t")

    def request(self, *, fails: bool, parent: str = "") -> str:
        """A span and a child of it; the traceparent that others are sent."""
        span = self.tracer.start_span("request", context=extract_traceparent(parent))
        context = trace.set_span_in_context(span)
        self.tracer.start_span("child", context=context).end()
        if fails:
            mark_failed(span)
        span.end()
        return inject_traceparent(context)

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


def is_sampled(traceparent: str) -> bool:
    return bool(int(traceparent[-2:], 16) & trace.TraceFlags.SAMPLED)


def test_an_unsampled_trace_is_exported_when_it_has_failed_and_only_then() -> None:
    process = Process(ALWAYS_OFF)
    process.request(fails=False)
    assert process.names == []
    traceparent = process.request(fails=True)
    assert process.names == ["child", "request"]
    child, request = process.exporter.get_finished_spans()
    assert child.parent.span_id == request.context.span_id
    assert {format(span.context.trace_id, "032x") for span in (child, request)} == {traceparent.split("-")[1]}
    assert all(span.context.trace_flags.sampled for span in (child, request))


def test_whoever_is_called_decides_by_its_own_part() -> None:
    """The context that travels says "not sampled": what fails at the other end is exported there, and what does not is not."""
    gateway, worker = Process(ALWAYS_OFF), Process(ParentBased(ALWAYS_ON))
    traceparent = gateway.request(fails=True)
    assert not is_sampled(traceparent)
    worker.request(fails=False, parent=traceparent)
    assert worker.names == []
    worker.request(fails=True, parent=traceparent)
    assert worker.names == ["child", "request", "child", "request"]  # of the same trace: those that came before are kept for it


def test_a_sampled_trace_is_exported_once() -> None:
    process = Process(ALWAYS_ON)
    assert is_sampled(process.request(fails=True))
    assert process.names == ["child", "request"]


def test_what_comes_after_the_failure_is_exported_too() -> None:
    process = Process(ALWAYS_OFF)
    traceparent = process.request(fails=True)
    process.request(fails=False, parent=traceparent)
    assert process.names == ["child", "request"] * 2


def test_an_error_alone_is_not_enough() -> None:
    process = Process(ALWAYS_OFF)
    span = process.tracer.start_span("refused")
    span.set_status(trace.StatusCode.ERROR, "max_tokens is missing")
    span.end()
    assert process.names == []


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_TRACES", 4)
    monkeypatch.setattr(kept, "MAX_SPANS_OF_TRACE", 3)
    monkeypatch.setattr(kept, "MAX_FAILED", 2)
    process = Process(ALWAYS_OFF)
    oldest, *_ = [process.request(fails=False) for _ in range(5)]
    process.request(fails=True, parent=oldest)
    assert process.names == ["child", "request"]  # those of its first part are gone
    long = process.request(fails=False)
    process.request(fails=False, parent=long)
    assert process.failed.num_dropped == 1
    for _ in range(4):
        process.request(fails=True)
    assert len(process.failed._failed) == 2
    assert len(process.failed._kept) <= 4


@pytest.mark.parametrize(("failures", "seen"), [(True, ["broken"]), (False, [])])
def test_the_sampler_is_opentelemetrys_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failures: bool, seen: list[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing = configure_tracing(TraceSettings(exporter="console", failures=failures), service="s", instance_id="i")
    for name in ("well", "broken"):
        span = tracing.tracer("t").start_span(name)
        if name == "broken":
            mark_failed(span)
        span.end()
    tracing.shutdown()
    text = capsys.readouterr().err
    assert ([json.loads(text)["name"]] if text else []) == seen
