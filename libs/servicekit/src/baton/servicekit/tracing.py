"""OpenTelemetry spans, and their context in gRPC metadata and in messages (W3C trace context). Off unless OTEL_TRACES_EXPORTER says otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.servicekit.errors import SettingsError
from baton.servicekit.failed_traces import FailedTraces, RecordAll
from baton.servicekit.groups import TraceSettings

_PROPAGATOR = TraceContextTextMapPropagator()
_FIELDS = frozenset(_PROPAGATOR.fields)

Metadata = Iterable[tuple[str, str | bytes]]


class Tracing:
    """Owns the process's span exporter; `shutdown` sends what is left and is idempotent."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider

    @property
    def enabled(self) -> bool:
        return self._provider is not None

    def tracer(self, name: str) -> trace.Tracer:
        """A tracer whose spans go where the settings say; a no-op one when tracing is off."""
        return trace.NoOpTracer() if self._provider is None else self._provider.get_tracer(name)

    def shutdown(self) -> None:
        """Flushes and closes the exporter. Blocks up to the exporter's timeout: call it off the event loop."""
        if self._provider is not None:
            self._provider.shutdown()
            self._provider = None


def resource_of(service: str, instance_id: str) -> Resource:
    """Who a process is, in its spans and in its metrics."""
    return Resource.create({"service.name": f"baton-{service}", "service.instance.id": instance_id, "service.namespace": "baton"})


def configure_tracing(settings: TraceSettings, *, service: str, instance_id: str) -> Tracing:
    """Sets up span export and returns its owner.

    Sampling, endpoints, headers and limits follow OpenTelemetry's own OTEL_* variables; what fails is exported whether it was sampled or not,
    unless the settings say otherwise. Raises SettingsError for an OTLP protocol other than grpc.
    """
    if settings.exporter == "none":
        return Tracing(None)
    provider = TracerProvider(resource=resource_of(service, instance_id))
    exporting = _processor(settings)
    provider.add_span_processor(exporting)
    if settings.failures:
        provider.sampler = RecordAll(provider.sampler)
        provider.add_span_processor(FailedTraces(exporting))
    return Tracing(provider)


def _processor(settings: TraceSettings) -> SpanProcessor:
    if settings.exporter == "console":
        return SimpleSpanProcessor(ConsoleSpanExporter(out=sys.stderr))
    check_otlp_protocol("TRACES")
    # imported here: a service without traces does not pay for the exporter's start-up
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return BatchSpanProcessor(OTLPSpanExporter())


def check_otlp_protocol(signal: str) -> None:
    """Raises SettingsError for a protocol other than grpc. signal: TRACES or METRICS."""
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name) or "grpc"
        if protocol != "grpc":
            raise SettingsError(f"{name}={protocol!r}: only grpc is supported; point OTEL_EXPORTER_OTLP_ENDPOINT at the collector's gRPC port")


def inject(metadata: Sequence[tuple[str, str]] = (), context: Context | None = None) -> list[tuple[str, str]]:
    """gRPC metadata with the trace context (the current one by default) added."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return [*metadata, *carrier.items()]


def extract(metadata: Metadata | None) -> Context:
    """The caller's trace context from gRPC metadata; an empty context when there is none or it is malformed."""
    carrier = {key: value for key, value in metadata or () if key in _FIELDS and isinstance(value, str)}
    return _PROPAGATOR.extract(carrier, Context())


def inject_traceparent(context: Context | None = None) -> str:
    """The trace context as one W3C traceparent; empty when there is no span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier.get("traceparent", "")


def extract_traceparent(traceparent: str) -> Context:
    """The context that a W3C traceparent names; an empty context when it is empty or malformed."""
    return _PROPAGATOR.extract({"traceparent": traceparent} if traceparent else {}, Context())
