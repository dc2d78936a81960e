"""Metrics by one table of instruments: OpenTelemetry's SDK, scraped by Prometheus or pushed by OTLP."""

from baton.servicekit.metrics.buckets import Buckets
from baton.servicekit.metrics.instruments import INSTRUMENTS, Instrument, transport_label
from baton.servicekit.metrics.metrics import FailedRoom, Metrics, Recorder, Values, configure_metrics

__all__ = ["INSTRUMENTS", "Buckets", "FailedRoom", "Instrument", "Metrics", "Recorder", "Values", "configure_metrics", "transport_label"]
