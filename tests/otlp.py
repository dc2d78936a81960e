"""A collector for the tests: takes what services push by OTLP over gRPC, and keeps it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True)
class Span:
    """Times in seconds, Unix. events: (name, when), in order."""

    service: str
    instance_id: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: float
    end: float
    events: tuple[tuple[str, float], ...]
    attributes: dict[str, Any]

    def at(self, event: str) -> float:
        return next(when for name, when in self.events if name == event)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Listens from being made until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        #: Of each service and metric: its points as they were last pushed, by their attributes.
        self._points: dict[tuple[str, str], dict[tuple[tuple[str, str], ...], Any]] = {}
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 # the contract's name, of both services
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            with self._lock:
                self._spans += [
                    _span(said(one.resource.attributes), span) for one in request.resource_spans for scope in one.scope_spans for span in scope.spans
                ]
            return trace_service_pb2.ExportTraceServiceResponse()
        with self._lock:
            for one in request.resource_metrics:
                service = said(one.resource.attributes)["service.name"]
                for metric in (metric for scope in one.scope_metrics for metric in scope.metrics):
                    points = getattr(metric, metric.WhichOneof("data")).data_points
                    kept = self._points.setdefault((service, metric.name), {})
                    kept |= {tuple(sorted(said(point.attributes).items())): point for point in points}
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def spans(self, trace_id: str) -> list[Span]:
        with self._lock:
            return [span for span in self._spans if span.trace_id == trace_id]

    def points(self, service: str, metric: str) -> list[Any]:
        with self._lock:
            return list(self._points.get((service, metric), {}).values())

    def metrics(self) -> set[tuple[str, str]]:
        """(service, name) of all that came."""
        with self._lock:
            return set(self._points)

    def close(self) -> None:
        self._server.stop(None).wait()


def said(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one) for one in attributes}


def _value(attribute: KeyValue) -> Any:
    return getattr(attribute.value, attribute.value.WhichOneof("value") or "string_value")


def _span(resource: dict[str, Any], span: Any) -> Span:
    return Span(
        service=resource["service.name"],
        instance_id=resource["service.instance.id"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        events=tuple((event.name, event.time_unix_nano / 1e9) for event in span.events),
        attributes=said(span.attributes),
    )
