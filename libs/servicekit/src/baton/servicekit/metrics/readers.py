"""Where metrics go, and what is counted outside of the SDK on its way there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from prometheus_client import CollectorRegistry

from baton.servicekit.metrics.buckets import Buckets
from baton.servicekit.metrics.instruments import Instrument
from baton.servicekit.tracing import check_otlp_protocol

#: (what it is, its labels, its counts)
Counted = tuple[Instrument, dict[str, str], Buckets]


class CountedSource:
    """Histograms that services count themselves, as the SDK's data: it has no instrument that observes a whole histogram."""

    def __init__(self, counted: Sequence[Counted]) -> None:
        self._counted = counted
        self._began_ns = time.time_ns()

    def added_to(self, data: MetricsData) -> MetricsData:
        """`data` and these beside the others of their scope: OTLP's encoder keeps one scope of a name, and one resource.

        The SDK gives no data where none of its own instruments was ever observed; every service has some.
        """
        resource, *more = data.resource_metrics
        scope, *others = resource.scope_metrics
        points: dict[str, tuple[Instrument, list[HistogramDataPoint]]] = {}
        for instrument, labels, buckets in self._counted:
            points.setdefault(instrument.name, (instrument, []))[1].append(self._point(labels, buckets))
        whole = replace(scope, metrics=[*scope.metrics, *(_metric(instrument, those) for instrument, those in points.values())])
        return MetricsData([replace(resource, scope_metrics=[whole, *others]), *more])

    def _point(self, labels: dict[str, str], buckets: Buckets) -> HistogramDataPoint:
        counts, total = list(buckets.counts), buckets.sum
        count = sum(counts)
        return HistogramDataPoint(
            attributes=labels,
            start_time_unix_nano=self._began_ns,
            time_unix_nano=time.time_ns(),
            count=count,
            sum=total,
            bucket_counts=counts,
            explicit_bounds=buckets.bounds,
            min=buckets.lowest if count else 0.0,
            max=buckets.highest if count else 0.0,
        )


def _metric(instrument: Instrument, points: list[HistogramDataPoint]) -> Metric:
    return Metric(instrument.name, instrument.about, instrument.unit, Histogram(points, AggregationTemporality.CUMULATIVE))


class ScrapedReader(PrometheusMetricReader):
    """For Prometheus: collected when somebody asks."""

    def __init__(self, source: CountedSource, registry: CollectorRegistry) -> None:
        self._source = source
        super().__init__(scope_info_enabled=False, registry=registry)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._source.added_to(metrics_data), timeout_millis, **kwargs)


class PushedReader(PeriodicExportingMetricReader):
    """For a collector: pushed every OTEL_METRIC_EXPORT_INTERVAL ms (60,000), on a thread of its own."""

    def __init__(self, source: CountedSource) -> None:
        self._source = source
        check_otlp_protocol("METRICS")
        # imported here: a service that pushes nothing does not pay for the exporter's start-up
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        super().__init__(OTLPMetricExporter())

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._source.added_to(metrics_data), timeout_millis, **kwargs)


def readers(exporters: Iterable[str], source: CountedSource, registry: CollectorRegistry) -> list[MetricReader]:
    """One for each of "prometheus", "otlp"."""
    make: dict[str, Callable[[], MetricReader]] = {
        "prometheus": lambda: ScrapedReader(source, registry),
        "otlp": lambda: PushedReader(source),
    }
    return [make[name]() for name in exporters]
