"""A worker's metrics, as somebody who scrapes them sees them."""

from __future__ import annotations

import io
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from baton.engine.step_time import PARTS
from baton.engine.types import EngineStats, KVReady, Role, TransferStats
from baton.servicekit import ListenSettings, LogSettings, Metrics, MetricsSettings, configure_logs, configure_metrics
from baton.workerkit import EngineHost, GpuMetrics, StepMetrics
from baton.workerkit.metrics import ReplyTime, TransferMetrics, observe_engine

HERE = MetricsSettings(exporter=("prometheus",), port=0)


@pytest.fixture(params=["prefill", "decode", "plain"])
def role(request: pytest.FixtureRequest) -> Role:
    return Role(request.param)


def made(role: Role) -> Metrics:
    return configure_metrics(HERE, service=role.value, instance_id="one", role=role.value)


def scraped(metrics: Metrics) -> dict[str, dict[str, float]]:
    """By name, and by what its labels but the role say."""
    address = metrics.listen(HERE, ListenSettings(), lambda: None)["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    metrics.shutdown()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            said = " ".join(value for label, value in sorted(sample.labels.items()) if label != "role")
            found.setdefault(sample.name, {})[said] = sample.value
    return found


def test_the_engines_snapshot_is_looked_up(role: Role, engine: Any) -> None:
    host = EngineHost(engine)
    host.stats = EngineStats(
        total_pages=20,
        free_pages=10,
        cached_pages=7,
        reserved_pages=1,
        published_pages=2,
        quarantined_pages=3,
        running_pages=4,
        waiting=7,
        running=5,
        tokens_in_flight=99,
        extra={"computed_tokens": 1000, "in_transfer": 2, "bootstrapping": 3, "pending_tokens": 11, "pending_prompt_tokens": 12, "retractions": 1,
               "recomputed_tokens": 6, "local_prefills": 8, "launches_replayed": 40, "launches_launched": 2},
    )  # fmt: skip
    metrics = made(role)
    observe_engine(metrics, host, role)
    found = scraped(metrics)
    assert found["baton_kv_pages"] == {"free": 3, "cached": 7, "reserved": 1, "published": 2, "quarantined": 3, "running": 4}
    queues = {
        Role.PREFILL: {"running": 5, "bootstrap": 3, "waiting": 4, "transfer": 2},
        Role.DECODE: {"running": 5, "pre_allocation": 7, "transfer": 2},
        Role.PLAIN: {"running": 5, "pre_allocation": 7},
    }
    assert found["baton_queue_length"] == queues[role]
    assert found["baton_tokens_pending"] == {"": 11 if role is Role.PREFILL else 12}
    assert found["baton_step_launches_total"] == {"replayed": 40, "launched": 2}
    assert found["baton_tokens_computed_total"] == {"": 1000}
    assert ("baton_retractions_total" in found) == (role is not Role.PREFILL)
    assert ("baton_prefills_on_decode_total" in found) == (role is Role.DECODE)


def test_steps_are_counted_in_buckets(role: Role) -> None:
    metrics = made(role)
    metrics.observe_one("baton.engine.stalled", lambda: 0)  # the SDK hands on nothing where none of its own instruments says anything
    steps = StepMetrics(metrics)
    for took_s, num_sequences, num_tokens in ((0.001, 1, 1), (0.004, 3, 40), (9.0, 1, 20_000)):
        steps.step(took_s, num_sequences, num_tokens)
    steps.host((1e-5, 2e-5, 3e-4, 4e-3, 5e-5, 6e-6), None)
    steps.host((1e-5, 2e-5, 3e-4, 4e-3, 5e-5, 6e-6), 2e-5)
    front = ReplyTime(metrics)
    front.batch()
    sum(range(200_000))
    front.batch()
    found = scraped(metrics)
    assert found["baton_step_duration_seconds_count"] == {"": 3}
    assert (found["baton_step_duration_seconds_bucket"]["0.005"], found["baton_step_duration_seconds_bucket"]["+Inf"]) == (2, 3)
    assert found["baton_step_sequences_sum"] == {"": 5}
    assert found["baton_step_tokens_sum"] == {"": 20_041}
    assert found["baton_step_host_seconds_count"] == {**dict.fromkeys(PARTS, 2), "reply": 1}
    assert found["baton_step_host_seconds_sum"]["wait"] == pytest.approx(8e-3)
    assert found["baton_step_host_seconds_sum"]["reply"] > 1e-4
    assert found["baton_step_idle_seconds_sum"] == {"": pytest.approx(2e-5)}
    off = StepMetrics(configure_metrics(MetricsSettings(), service="prefill", instance_id="two"))
    off.step(0.1, 1, 1)
    off.host((0.0,) * len(PARTS), 0.0)


def test_transfers_by_transport() -> None:
    metrics = made(Role.PREFILL)
    transfers = TransferMetrics(metrics, Role.PREFILL)
    transfers.transferred(TransferStats("rc_mlx5/mlx5_0:1", 1 << 20, 4, 0.2, 0.01, False, busy_s=0.1))
    transfers.transferred(TransferStats("sysv", 0, 0, 0.0, 0.002, False))  # decode held all of it
    found = scraped(metrics)
    assert found["baton_transfer_size_bytes_sum"] == {"rc": 1 << 20}
    assert found["baton_transfer_put_size_bytes_sum"] == {"rc": 1 << 18}
    assert found["baton_transfer_speed_bytes_per_second_sum"] == {"rc": pytest.approx((1 << 20) / 0.1)}
    assert found["baton_transfer_exposed_seconds_count"] == {"rc": 1, "sysv": 1}
    assert found["baton_transfer_duration_seconds_count"] == {"rc": 1}


def test_landings_without_a_shared_clock_are_left_out() -> None:
    metrics = made(Role.DECODE)
    transfers = TransferMetrics(metrics, Role.DECODE)
    transfers.landed(KVReady(1, False, 0.0, 5))
    transfers.landed(KVReady(2, False, 0.003, 5))
    assert scraped(metrics)["baton_landing_exposed_seconds_count"] == {"": 1}


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    configure_logs(LogSettings(format="json"), service="decode", instance_id="d-1", stream=stream)
    yield stream
    structlog.reset_defaults()


def test_a_gpu_that_cannot_be_asked_is_named_once(logged: io.StringIO) -> None:
    GpuMetrics(made(Role.DECODE), ["99"])
    (line,) = [json.loads(text) for text in logged.getvalue().splitlines()]
    assert (line["event"], bool(line["reason"])) == ("no GPU metrics", True)
    GpuMetrics(made(Role.DECODE), [""])  # a CPU has none to ask for
    assert len(logged.getvalue().splitlines()) == 1
