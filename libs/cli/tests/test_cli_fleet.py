"""Which processes a topology needs and with which flags; no process is started."""

import os
import socket
from pathlib import Path

import pytest

from baton.cli.errors import UsageError
from baton.cli.fleet import FleetOptions, Transport, check_ports, decode_spec, gateway_spec, plain_spec, prefill_spec
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
            check_ports(options)
    check_ports(options)


@pytest.mark.parametrize(("field", "value", "named"), [("num_prefill", 0, "--prefill is 0"), ("num_decode", 17, "--decode is 17.*1 to 16")])
def test_counts_out_of_range_are_named(folder: Path, field: str, value: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        FleetOptions(folder, "m", **{field: value})


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model: .*nowhere is not a Hugging Face folder"):
        FleetOptions(tmp_path / "nowhere", "m")


def test_only_the_latest_run_folders_and_those_in_use_stay(tmp_path: Path) -> None:
    in_use = tmp_path / f"20190101-000000-{os.getppid()}"
    in_use.mkdir()
    for index in range(12):
        (tmp_path / f"20200101-0000{index:02}-{GONE_PID}").mkdir()
    newest = new_run_dir(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [in_use.name, *(f"20200101-0000{index:02}-{GONE_PID}" for index in range(3, 12)), newest.name]
