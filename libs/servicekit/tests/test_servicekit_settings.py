from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field, SecretStr

from baton.servicekit import (
    ListenSettings,
    LogSettings,
    MetricsSettings,
    Port,
    ServiceSettings,
    SettingsError,
    TlsSettings,
    TraceSettings,
    check_ports,
)


class ProbeSettings(ServiceSettings):
    """A service made up for this test."""

    service: ClassVar[str] = "probe"
    listen: ListenSettings = ListenSettings(port=50099)
    log: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    tls: TlsSettings = TlsSettings()
    model_path: Path = Field(description="Folder of the model.")
    page_size: int = Field(default=16, gt=0, description="Tokens a page.")
    role: Literal["decode", "plain"] = Field(default="decode", description="What it does.")
    peers: tuple[str, ...] = Field(default=(), description="Addresses.")
    digest: bool = Field(default=False, description="Check digests.")
    key: SecretStr | None = Field(default=None, description="A secret.")
    ratio: float | None = Field(default=None, gt=0, le=1, description="CPU share.")


def load(argv: list[str] | None = None, **environ: str) -> ProbeSettings:
    return ProbeSettings.load(["--model-path", "/m", *(argv or [])], environ)


def test_defaults_variables_flags_in_rising_order() -> None:
    assert load().page_size == 16
    assert load(BATON_PROBE_PAGE_SIZE="32").page_size == 32
    assert load(["--page-size", "64"], BATON_PROBE_PAGE_SIZE="32").page_size == 64


def test_a_group_keeps_the_default_that_the_service_gave_it() -> None:
    assert load().listen.port == 50099
    changed = load(BATON_PROBE_HOST="::1")
    assert (changed.listen.host, changed.listen.port) == ("::1", 50099)


def test_shared_variable_rules_and_the_services_own_one_wins() -> None:
    assert load(BATON_LOG_LEVEL="debug").log.level == "debug"
    assert load(BATON_LOG_LEVEL="debug", BATON_PROBE_LOG_LEVEL="error").log.level == "error"
    assert load(["--log-level", "warning"], BATON_PROBE_LOG_LEVEL="error").log.level == "warning"
    assert load(OTEL_TRACES_EXPORTER="console").traces.exporter == "console"


def test_a_private_group_has_no_shared_variable() -> None:
    assert load(BATON_PORT="1").listen.port == 50099


def test_types() -> None:
    settings = load(["--digest", "--peers", "a:1, b:2,"], BATON_PROBE_RATIO="0.5", BATON_PROBE_KEY="s3cret")
    assert settings.digest is True
    assert settings.peers == ("a:1", "b:2")
    assert load(["--peers", "a:1", "--peers=b:2,c:3"]).peers == ("a:1", "b:2", "c:3")  # the last one does not win in silence
    assert settings.ratio == 0.5
    assert settings.model_path == Path("/m")
    assert settings.key is not None
    assert settings.key.get_secret_value() == "s3cret"
    assert load(["--no-digest"], BATON_PROBE_DIGEST="true").digest is False
    assert load(BATON_PROBE_DIGEST="1").digest is True


def test_an_empty_variable_is_not_set() -> None:
    assert load(BATON_PROBE_PAGE_SIZE="").page_size == 16


@pytest.mark.parametrize(
    ("environ", "argv", "said"),
    [
        ({"BATON_PROBE_PAGE_SIZE": "abc"}, [], "BATON_PROBE_PAGE_SIZE='abc'"),
        ({"BATON_PROBE_PAGE_SIZE": "0"}, [], "BATON_PROBE_PAGE_SIZE='0'"),
        ({"BATON_PROBE_PAGE_SIZE": "8"}, ["--page-size", "-1"], "--page-size='-1'"),
        ({"BATON_LOG_LEVEL": "loud"}, [], "BATON_LOG_LEVEL='loud'"),
        ({"BATON_PROBE_PORT": "70000"}, [], "BATON_PROBE_PORT='70000'"),
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, [], "OTEL_TRACES_EXPORTER='jaeger'"),
        ({"BATON_PROBE_PORT": "tcp://10.0.0.1:80"}, [], "enableServiceLinks"),
        ({"BATON_PROBE_PAEG_SIZE": "8"}, [], "did you mean BATON_PROBE_PAGE_SIZE?"),
        ({"BATON_PROBE_INSTANCE_ID": "a b"}, [], "BATON_PROBE_INSTANCE_ID='a b'"),
        ({"BATON_TLS_CERT_FILE": "/c"}, [], "--tls-cert-file and --tls-key-file go together"),
    ],
)
def test_a_bad_value_stops_and_is_named(environ: dict[str, str], argv: list[str], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(argv, **environ)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "ending"), [(["--ratio", "2"], "What it sets: CPU share."), (["--page-size", "0"], "What it sets: Tokens a page.")]
)
def test_a_bad_value_is_told_with_what_it_is(flags: list[str], ending: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(flags)
    assert str(error.value).endswith(ending)


def test_a_rule_of_ours_is_told_in_our_words() -> None:
    with pytest.raises(SettingsError) as error:
        load(["--instance-id", "a b"], BATON_TLS_CERT_FILE="/c")
    assert "Value error" not in str(error.value)
    with pytest.raises(SettingsError) as error:
        load(BATON_TLS_CERT_FILE="/c")
    assert str(error.value).startswith("--tls-cert-file and --tls-key-file go together")


@pytest.mark.parametrize(
    ("place", "why"), [("none/ready.json", "No such file or directory"), ("", "this is a folder"), ("file/ready.json", "Not a directory")]
)
def test_a_ready_file_that_cannot_be_written_is_a_bad_value(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=f"BATON_PROBE_READY_FILE='{tmp_path / place}': .*{why}.*File that is written once"):
        load(BATON_PROBE_READY_FILE=str(tmp_path / place))


def test_a_ready_file_is_tried_and_left_as_it_is(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    load(["--ready-file", str(ready)])
    assert list(tmp_path.iterdir()) == []
    ready.write_text("another process's")
    load(["--ready-file", str(ready)])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["another process's"]


def ports(*numbers: int, hosts: tuple[str, ...] = ()) -> list[Port]:
    return [Port(f"--port-{index}", (hosts or ("10.0.0.1",) * 9)[index], number) for index, number in enumerate(numbers)]


@pytest.mark.parametrize("wanted", [ports(1, 2, 3), ports(0, 0), ports(1, 1, hosts=("10.0.0.1", "10.0.0.2")), []])
def test_ports_that_differ(wanted: list[Port]) -> None:
    check_ports(wanted)


@pytest.mark.parametrize("hosts", [(), ("0.0.0.0", "", "127.0.0.1"), ("127.0.0.1", "", "::")])
def test_two_equal_ports_are_named(hosts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^--port-0 and --port-2 are both 7000: give each a port of its own, or 0"):
        check_ports(ports(7000, 1, 7000, hosts=hosts))


def test_metrics_ports_of_several_processes() -> None:
    scraped = MetricsSettings(exporter=("prometheus",), port=9464)
    assert scraped.ports("h", 2) == [Port("--metrics-port", "h", 9464), Port("--metrics-port + 1", "h", 9465)]
    assert MetricsSettings(exporter=("otlp",)).ports("h") == []
    assert MetricsSettings(exporter=("prometheus",), port=0, host="other").ports("h", 2) == [
        Port("--metrics-port", "other", 0),
        Port("--metrics-port + 1", "other", 0),
    ]


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        load(BATON_PROBE_PAGE_SIZE="x", BATON_PROBE_ROLE="y", BATON_PROBE_Z="z")
    assert [name in str(caught.value) for name in ("PAGE_SIZE='x'", "ROLE='y'", "BATON_PROBE_Z")] == [True] * 3


def test_a_missing_required_setting_names_flag_and_variable() -> None:
    with pytest.raises(SettingsError, match=r"--model-path \(or BATON_PROBE_MODEL_PATH\) is required"):
        ProbeSettings.load([], {})


def test_kubernetes_service_links_are_no_typos() -> None:
    load(BATON_PROBE_SERVICE_HOST="10.0.0.1", BATON_PROBE_PORT_8998_TCP_ADDR="10.0.0.1", BATON_PROBE_SERVICE_PORT_GRPC="8998")


def test_a_secret_is_never_printed() -> None:
    assert "s3cret" not in repr(load(BATON_PROBE_KEY="s3cret"))


def test_unknown_flag_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--page-siz", "8"])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        load(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for setting in ProbeSettings.describe():
        assert setting.flag in text
        assert setting.env in text


def test_settings_are_frozen() -> None:
    settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.page_size = 1  # type: ignore[misc]


def test_describe_lists_every_setting_once() -> None:
    rows = {row.env: row for row in ProbeSettings.describe()}
    assert len(rows) == len(ProbeSettings.describe())
    assert rows["BATON_PROBE_PAGE_SIZE"].type_name == "integer"
    assert rows["BATON_PROBE_PAGE_SIZE"].default_text == "16"
    assert rows["BATON_PROBE_ROLE"].type_name == "decode | plain"
    assert rows["BATON_PROBE_PEERS"].type_name == "list of text"
    assert rows["BATON_PROBE_MODEL_PATH"].default_text == "required"
    assert rows["BATON_PROBE_PORT"].default_text == "50099"
    assert rows["BATON_PROBE_LOG_LEVEL"].shared_env == "BATON_LOG_LEVEL"
    assert rows["BATON_PROBE_PORT"].shared_env is None
    assert all(row.description.endswith((".", "channels")) for row in rows.values())


def test_advertised_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert ListenSettings().advertised_host() == "127.0.0.1"
    assert ListenSettings(host="0.0.0.0").advertised_host() == "here"
    assert ListenSettings(host="::").advertised_host() == "here"
    assert ListenSettings(host="0.0.0.0", advertise_host="there").advertised_host() == "there"
    assert ListenSettings(host="node7").advertised_host() == "node7"
