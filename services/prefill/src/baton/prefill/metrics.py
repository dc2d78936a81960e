"""What the exporter counts anyway, as metrics."""

from __future__ import annotations

from baton.prefill.exporter import Exporter
from baton.servicekit import Metrics
from baton.workerkit.metrics import by_cause


def observe_exporter(metrics: Metrics, exporter: Exporter) -> None:
    counters = exporter.counters
    metrics.observe("baton.publications.declined", lambda: by_cause(counters, "declined/"))
    metrics.observe_one("baton.revokes.received", lambda: counters["revoked"])
    exporter.on_digest(metrics.recorder("baton.digest.wait").record)
    metrics.observe_one("baton.writes.failed", lambda: counters["write_failed"])
