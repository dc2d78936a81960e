"""Which processes a topology needs and with which flags; no process is started."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from baton.cli.errors import UsageError
from baton.cli.fleet import FleetOptions, Topology, Transport, decode_spec, gateway_spec, plain_spec, ports_of, prefill_spec
from baton.cli.fleet_ports import check_ports
from baton.cli.up import new_run_dir

# Above the largest process id that Linux can be set to give out.
GONE_PID = 2**22 + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def value_of(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_every_service_gets_the_model_and_a_name(folder: Path) -> None:
    options = FleetOptions(folder, "m", transport=Transport.TCP)
    workers = [prefill_spec(options, 0), decode_spec(options, 1), plain_spec(options, 2)]
    assert [spec.name for spec in workers] == ["prefill-0", "decode-1", "plain-2"]
    for spec in workers:
        assert value_of(spec.command, "--model-path") == str(folder)
        assert value_of(spec.command, "--model-name") == "m"
        assert value_of(spec.command, "--port") == "0"
    assert [value_of(spec.command, "--transport") for spec in workers[:2]] == ["tcp", "tcp"]
    assert [value_of(spec.command, "--role") for spec in workers[1:]] == ["decode", "plain"]


def test_only_the_first_prefill_server_has_the_well_known_port(folder: Path) -> None:
    options = FleetOptions(folder, "m", num_prefill=2)
    assert [value_of(prefill_spec(options, index).command, "--bootstrap-port") for index in (0, 1)] == ["8998", "0"]


def test_the_gateway_is_told_where_the_workers_are(folder: Path) -> None:
    command = gateway_spec(FleetOptions(folder, "m"), {"prefill": ["h:1", "h:2"], "decode": ["h:3"]}).command
    assert (value_of(command, "--prefill"), value_of(command, "--decode")) == ("h:1,h:2", "h:3")
    assert (value_of(command, "--port"), value_of(command, "--http-port")) == ("8001", "8000")


@pytest.mark.parametrize("field", ["http_port", "grpc_port", "bootstrap_port"])
def test_a_port_that_is_taken_is_named_before_anything_is_started(folder: Path, field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"http_port": 0, "grpc_port": 0, "bootstrap_port": 0} | {field: port}
        options = FleetOptions(folder, "m", http_port=ports["http_port"], grpc_port=ports["grpc_port"], bootstrap_port=ports["bootstrap_port"])
        with pytest.raises(UsageError, match=f"--{field.replace('_', '-')}={port}: .*in use"):
            check_ports(ports_of(options, {}))
    check_ports(ports_of(options, {}))


SCRAPED = {"OTEL_METRICS_EXPORTER": "prometheus"}
ANY_PORTS = {"http_port": 0, "grpc_port": 0, "bootstrap_port": 0}


@pytest.mark.parametrize(
    ("asked", "environ", "named"),
    [
        ({"num_prefill": 2}, SCRAPED, "prefill-0's --metrics-port and prefill-1's --metrics-port are both 9465: .*--worker-flag=--metrics-port=0"),
        ({"num_decode": 2, "topology": Topology.PLAIN}, SCRAPED, "plain-0's --metrics-port and plain-1's --metrics-port are both 9466"),
        ({"worker_flags": ("--metrics-port", "7000")}, SCRAPED, "prefill-0's --metrics-port and decode-0's --metrics-port are both 7000"),
        ({"num_decode": 2, "worker_flags": ("--metrics-exporter=otlp,prometheus",)}, {}, "decode-0's .* and decode-1's .* are both 9466"),
        ({"num_prefill": 2}, SCRAPED | {"BATON_PREFILL_METRICS_PORT": "7000"}, "prefill-0's .* and prefill-1's .* are both 7000"),
        ({"http_port": 9466}, SCRAPED, "--http-port and decode-0's --metrics-port are both 9466"),
        ({"http_port": 7000, "grpc_port": 7000}, {}, "--http-port and --grpc-port are both 7000"),
    ],
)
def test_two_equal_ports_of_a_fleet_are_named(folder: Path, asked: dict[str, Any], environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_ports(ports_of(FleetOptions(folder, "m", **(ANY_PORTS | asked)), environ))


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        ((), {}),
        ((), {"OTEL_METRICS_EXPORTER": "otlp"}),
        (("--metrics-exporter", "none"), SCRAPED),
        (("--metrics-port=0", "--threads", "1"), SCRAPED | {"BATON_GATEWAY_METRICS_PORT": "0"}),
        (("--metrics-port=none",), {"OTEL_METRICS_EXPORTER": "prometheus", "BATON_GATEWAY_METRICS_PORT": "0"}),  # the servers say that
    ],
)
def test_servers_whose_metrics_ports_do_not_collide(folder: Path, flags: tuple[str, ...], environ: dict[str, str]) -> None:
    check_ports(ports_of(FleetOptions(folder, "m", num_prefill=2, num_decode=2, worker_flags=flags, **ANY_PORTS), environ))


def test_a_metrics_port_that_is_taken_is_named_before_anything_is_started(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = SCRAPED | {"BATON_DECODE_METRICS_PORT": str(port), "BATON_GATEWAY_METRICS_PORT": "0", "BATON_PREFILL_METRICS_PORT": "0"}
        with pytest.raises(UsageError, match=f"decode-0's --metrics-port={port}: cannot listen on 127.0.0.1:{port}: .*in use"):
            check_ports(ports_of(FleetOptions(folder, "m", **ANY_PORTS), environ))


@pytest.mark.parametrize(("field", "value", "named"), [("num_prefill", 0, "--prefill is 0"), ("num_decode", 17, "--decode is 17.*1 to 16")])
def test_counts_out_of_range_are_named(folder: Path, field: str, value: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        FleetOptions(folder, "m", **{field: value})


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model: .*nowhere is not a Hugging Face folder"):
        FleetOptions(tmp_path / "nowhere", "m")


@pytest.mark.parametrize("num_over", range(13))
def test_only_the_latest_run_folders_and_those_in_use_stay(tmp_path: Path, num_over: int) -> None:
    in_use = tmp_path / f"20190101-000000-{os.getppid()}"
    in_use.mkdir()
    for index in range(num_over):
        (tmp_path / f"20200101-0000{index:02}-{GONE_PID}").mkdir()
    newest = new_run_dir(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [in_use.name, *(f"20200101-0000{index:02}-{GONE_PID}" for index in range(max(0, num_over - 9), num_over)), newest.name]
