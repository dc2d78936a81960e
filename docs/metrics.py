"""Writes docs/metrics.md from the table of instruments; `--check` says whether it is what the table says now."""

from __future__ import annotations

import sys

from generated import write_or_check

from baton.servicekit.metrics.instruments import CAUSES, INSTRUMENTS, OTHER, Instrument

INTRODUCTION = """# Metrics

Made by `python docs/metrics.py` from [the table of instruments](../libs/servicekit/src/baton/servicekit/metrics/instruments.py), which the services
record by; `tox run -e metrics` checks that it is up to date, and [a test](../tests/test_metrics.py) compares it with what a real Prometheus finds.

`OTEL_METRICS_EXPORTER=prometheus` opens a port of its own on every service, which answers `/metrics`: 9464 on a gateway (with `--processes`, 9464 and
the next ones: each process has its own), 9465 on a prefill, 9466 on a decode or plain server; `--metrics-port`, `--metrics-host`. Several
servers of a role on one machine need a port each (`baton up --worker-flag=--metrics-port=0`: their logs say which; without it `baton up` names two
that would be one, and starts nothing). Where a service has certificates the port shows them, and asks for one where it has a CA file
(`--no-metrics-tls`: plain text). `OTEL_METRICS_EXPORTER=otlp` pushes the
same metrics to `OTEL_EXPORTER_OTLP_ENDPOINT` every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds; `prometheus,otlp` does both. By default metrics are
off. Prometheus' scrape configuration, rules, alerts and a dashboard are in [deploy/observability](../deploy/observability).

* Names are OpenTelemetry's; Prometheus' are made from them: dots become underscores, the unit and, for counters, `_total` are added. A histogram is
  `_bucket`, `_sum` and `_count`.
* Every metric has the label `role`: gateway, prefill, decode or plain. Labels have the values of the last column and no others; what is none of them
  is `other`, so that nobody who sends requests can make series. Instance ids are bounded by the fleet.
* The three counters of failed rooms have a 0 for each origin from the start, so that a rate sees the first failure. Others with labels come with what
  they count.
* Gauges, and counters of what services count anyway, are looked up when somebody collects them. Histograms are recorded once a room or a request;
  those of steps and of gaps between tokens are counted in buckets beside the engine's and the gateway's work, without OpenTelemetry.
  [benchmarks/metrics_cost.py](../benchmarks/metrics_cost.py) measures what that costs.
* Not here, because it does not exist: tokens that differ after tokenising an answer again.
"""


def page() -> str:
    groups = {
        "Gateways": [one for one in INSTRUMENTS if one.roles == ("gateway",)],
        "Gateways and servers": [one for one in INSTRUMENTS if "gateway" in one.roles and len(one.roles) > 1],
        "Prefill, decode and plain servers": [one for one in INSTRUMENTS if "gateway" not in one.roles],
    }
    parts = [INTRODUCTION, *(f"## {title}\n\n{table(instruments)}" for title, instruments in groups.items()), causes()]
    return "\n".join(parts)


def table(instruments: list[Instrument]) -> str:
    lines = ["| metric | kind | unit | of | what it is | labels |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(row(instrument) for instrument in instruments)]) + "\n"


def row(instrument: Instrument) -> str:
    labels = "; ".join(f"`{label}`: {values(allowed)}" for label, allowed in instrument.labels.items())
    unit = instrument.unit.strip("{}")
    return f"| `{instrument.prometheus}` | {instrument.kind} | {unit} | {', '.join(instrument.roles)} | {instrument.about} | {labels} |"


def values(allowed: tuple[str, ...]) -> str:
    return "a cause" if allowed == CAUSES else ", ".join(allowed)


def causes() -> str:
    text = ", ".join(f"`{cause}`" for cause in sorted(CAUSES))
    return f"## Causes\n\n{text}, `{OTHER}`. What of them each fault has: [failures.md](failures.md).\n"


if __name__ == "__main__":
    sys.exit(write_or_check(__file__, __doc__, page()))
