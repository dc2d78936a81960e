"""Metrics as somebody who collects them sees them."""

from __future__ import annotations

import re
import ssl
import threading
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from baton.servicekit import (
    AddressUnavailableError,
    FailedRoom,
    ListenSettings,
    Metrics,
    MetricsSettings,
    SettingsError,
    TlsFiles,
    TlsSettings,
    configure_metrics,
)
from baton.servicekit.metrics import INSTRUMENTS, transport_label
from baton.servicekit.metrics.instruments import CAUSES, OTHER
from baton.servicekit.metrics.listener import MAX_CONNECTIONS

HERE = MetricsSettings(exporter=("prometheus",), port=0)


def made(role: str = "gateway") -> Metrics:
    return configure_metrics(HERE, service=role, instance_id=f"{role}-1", role=role)


def scraped(address: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and sorted labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_what_is_recorded_observed_and_counted_is_scraped() -> None:
    metrics = made()
    refused = metrics.recorder("baton.requests.refused")
    refused.record(1, cause="overloaded")
    refused.record(2, cause="never heard of")
    metrics.recorder("baton.request.time_to_first_token").record(0.07)
    metrics.observe("baton.queue.length", lambda: [(3, {"queue": "admission"})])
    gaps = metrics.buckets("baton.request.inter_token_latency")
    assert gaps is not None
    for gap in (0.001, 0.0011, 9.0):
        gaps.add(gap)
    gaps.add_zeros(2)
    address = metrics.listen(HERE, ListenSettings(), lambda: None)["metrics"]
    found = scraped(address)
    role = ("role", "gateway")
    assert found["baton_requests_refused_total"] == {(("cause", "overloaded"), role): 1, (("cause", OTHER), role): 2}
    assert found["baton_queue_length"] == {(("queue", "admission"), role): 3}
    ttft = found["baton_request_time_to_first_token_seconds_bucket"]
    assert (ttft[("le", "0.06"), role], ttft[("le", "0.08"), role]) == (0, 1)
    name = "baton_request_inter_token_latency_seconds"
    assert found[f"{name}_count"] == {(role,): 5}
    assert found[f"{name}_sum"][(role,)] == pytest.approx(9.0021)
    buckets = {dict(labels)["le"]: count for labels, count in found[f"{name}_bucket"].items()}
    assert (buckets["0.001"], buckets["0.0025"], buckets["2.5"], buckets["+Inf"]) == (3, 4, 4, 5)
    assert dict(next(iter(found["target_info"])))["service_instance_id"] == "gateway-1"
    metrics.shutdown()
    metrics.shutdown()
    with pytest.raises(urllib.error.URLError):
        scraped(address)


def test_failures_are_three_counters_that_begin_at_zero() -> None:
    metrics = made("decode")
    failures: Counter[FailedRoom] = Counter()
    metrics.observe_failures(failures)
    address = metrics.listen(HERE, ListenSettings(), lambda: None)["metrics"]

    def counts() -> dict[str, float]:
        found = scraped(address)
        return {short: sum(found[f"baton_{short}_failed_total"].values()) for short in ("rooms", "bootstrap", "transfer")}

    assert counts() == {"rooms": 0, "bootstrap": 0, "transfer": 0}
    failures[FailedRoom("prefill", "TRANSFERRING", "prefill_lost", "prefill", True)] += 1
    assert counts() == {"rooms": 1, "bootstrap": 0, "transfer": 1}
    failures[FailedRoom("prefill", "BOOTSTRAPPING", "prefill_lost", "prefill", True)] += 1
    assert counts() == {"rooms": 2, "bootstrap": 1, "transfer": 1}
    failures[FailedRoom("decode", "WAITING", "engine_failed", "none", False)] += 1
    failures[FailedRoom("decode", "SUCCESS", "engine_failed", "prefill", True)] += 1
    assert counts() == {"rooms": 4, "bootstrap": 1, "transfer": 1}
    failures[FailedRoom("a", "b", "c", "d", True)] += 1
    failures[FailedRoom("e", "f", "g", "h", True)] += 1
    others = (("cause", OTHER), ("origin", OTHER), ("role", "decode"), ("stage", OTHER))
    assert scraped(address)["baton_rooms_failed_total"][others] == 2
    metrics.shutdown()


def test_off_is_nothing_at_all() -> None:
    metrics = configure_metrics(MetricsSettings(), service="gateway", instance_id="g")
    assert not metrics.enabled
    assert metrics.buckets("baton.request.inter_token_latency") is None
    metrics.recorder("baton.requests.refused").record(1, cause="overloaded")
    metrics.observe("baton.queue.length", list)
    assert metrics.listen(MetricsSettings(), ListenSettings(), lambda: None) == {}
    metrics.shutdown()


def test_only_the_tables_metrics_labels_and_roles() -> None:
    metrics = made("prefill")
    with pytest.raises(KeyError):
        metrics.recorder("baton.no.such.metric")
    with pytest.raises(ValueError, match=r"no metric of role prefill"):
        metrics.recorder("baton.requests.refused")
    with pytest.raises(ValueError, match="has the labels"):
        metrics.recorder("baton.rooms.failed").record(1, cause="overloaded")
    metrics.shutdown()


def test_the_table_is_in_order() -> None:
    names = [instrument.name for instrument in INSTRUMENTS]
    assert len(set(names)) == len(names)
    assert len({instrument.prometheus for instrument in INSTRUMENTS}) == len(names)
    assert len(set(CAUSES)) == len(CAUSES)
    for instrument in INSTRUMENTS:
        assert re.fullmatch(r"baton(\.[a-z_]+)+", instrument.name)
        assert bool(instrument.bounds) == (instrument.kind == "histogram"), instrument.name
        assert list(instrument.bounds) == sorted(set(instrument.bounds)), instrument.name
        assert instrument.about.endswith("."), instrument.name


@pytest.mark.parametrize(
    ("path", "label"),
    [("sysv", "sysv"), ("rc_mlx5/mlx5_0:1", "rc"), ("tcp", "tcp"), ("cuda_ipc/cuda, tcp/eth0", "cuda_ipc"), ("", "none"), ("gaudi_gdr", OTHER)],
)
def test_transports(path: str, label: str) -> None:
    assert transport_label(path) == label


def test_the_port_is_bounded_answers_side_by_side_and_only_one_path() -> None:
    metrics = made()
    metrics.observe_one("baton.routes", lambda: 4)
    address = metrics.listen(HERE, ListenSettings(), lambda: None)["metrics"]
    answers: list[float] = []
    threads = [threading.Thread(target=lambda: answers.append(sum(scraped(address)["baton_routes"].values()))) for _ in range(MAX_CONNECTIONS // 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [4] * len(threads)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{address}/", timeout=10)
    port = int(address.rpartition(":")[2])
    with pytest.raises(AddressUnavailableError, match="--metrics-port"):
        made().listen(MetricsSettings(exporter=("prometheus",), port=port), ListenSettings(), lambda: None)
    metrics.shutdown()


def test_processes_of_one_service_listen_side_by_side() -> None:
    first, second = made(), made()
    address = first.listen(HERE, ListenSettings(), lambda: None)["metrics"]
    beside = MetricsSettings(exporter=("prometheus",), port=int(address.rpartition(":")[2]) - 1)
    with pytest.raises(AddressUnavailableError):
        second.listen(beside, ListenSettings(), lambda: None, port_offset=1)
    first.shutdown()
    assert second.listen(beside, ListenSettings(advertise_host="here"), lambda: None, port_offset=1)["metrics"] == f"here:{beside.port + 1}"
    second.shutdown()


def test_the_port_shows_and_asks_for_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    for name, blobs in {"cert": certificate.cert_chain_pems, "key": [certificate.private_key_pem], "ca": [authority.cert_pem]}.items():
        (tmp_path / name).write_bytes(b"".join(blob.bytes() for blob in blobs))
    files = TlsFiles(TlsSettings(cert_file=tmp_path / "cert", key_file=tmp_path / "key", ca_file=tmp_path / "ca"))
    metrics = made()
    metrics.observe_one("baton.routes", lambda: 4)
    address = metrics.listen(HERE, ListenSettings(), files.current_context)["metrics"]
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with pytest.raises(OSError):  # noqa: PT011 # whichever way the handshake fails
        urllib.request.urlopen(f"https://{address}/metrics", timeout=10, context=context).read()
    authority.issue_cert("scraper").configure_cert(context)
    assert b"target_info" in urllib.request.urlopen(f"https://{address}/metrics", timeout=10, context=context).read()
    metrics.shutdown()
    plain = made()
    plain.observe_one("baton.routes", lambda: 4)
    address = plain.listen(MetricsSettings(exporter=("prometheus",), port=0, tls=False), ListenSettings(), files.current_context)["metrics"]
    assert scraped(address)
    plain.shutdown()


def test_settings_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="none stands alone"):
        MetricsSettings(exporter=("none", "otlp"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf")
    with pytest.raises(SettingsError, match="only grpc"):
        configure_metrics(MetricsSettings(exporter=("otlp",)), service="gateway", instance_id="g")
