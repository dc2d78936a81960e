from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from baton.servicekit import (
    LogSettings,
    SettingsError,
    TraceSettings,
    configure_logs,
    configure_tracing,
    extract,
    extract_traceparent,
    get_logger,
    inject,
    inject_traceparent,
)


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_name_who_speaks_also_through_the_standard_library() -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(), service="decode", instance_id="decode-1", stream=stream)
    get_logger("ours").info("room opened", room=7)
    logging.getLogger("theirs").warning("slow %s", "disk")
    ours, theirs = lines(stream)
    assert (ours["event"], ours["room"], ours["service"], ours["instance_id"], ours["level"]) == ("room opened", 7, "decode", "decode-1", "info")
    assert (theirs["event"], theirs["logger"], theirs["service"]) == ("slow disk", "theirs", "decode")
    assert str(ours["timestamp"]).endswith("Z")


def test_level_and_exception() -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(level="warning"), service="s", instance_id="i", stream=stream)
    log = get_logger("x")
    log.info("quiet")
    logging.getLogger("y").info("quiet")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    (only,) = lines(stream)
    assert only["event"] == "failed"
    assert "ValueError: broken" in str(only["exception"])


def test_no_client_writes_into_the_log_by_a_trace_header() -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(), service="s", instance_id="i", stream=stream)
    extract([("traceparent", "x" * 7000)])
    extract([("traceparent", "-".join(("00", "a" * 32, "b" * 16, "01"))), ("tracestate", "mine=" + "secret" * 1000)])
    assert stream.getvalue() == ""


def test_console_format_is_for_people() -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(format="console"), service="s", instance_id="i", stream=stream)
    get_logger("x").info("hello", room=3)
    assert "hello" in stream.getvalue()
    assert "room=3" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_a_line_inside_a_span_carries_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    configure_logs(LogSettings(), service="s", instance_id="i", stream=stream)
    tracing = configure_tracing(TraceSettings(exporter="console"), service="s", instance_id="i")
    with tracing.tracer("t").start_as_current_span("work") as span:
        get_logger("x").info("inside")
    get_logger("x").info("outside")
    tracing.shutdown()
    inside, outside = lines(stream)
    assert inside["trace_id"] == format(span.get_span_context().trace_id, "032x")
    assert "trace_id" not in outside
    assert '"name": "work"' in capsys.readouterr().err


def test_context_travels_in_metadata_and_in_messages() -> None:
    tracing = configure_tracing(TraceSettings(exporter="console"), service="s", instance_id="i")
    tracer = tracing.tracer("t")
    with tracer.start_as_current_span("parent") as parent:
        metadata = inject([("room", "1")])
        traceparent = inject_traceparent()
    assert metadata[0] == ("room", "1")
    for context in (extract(metadata), extract_traceparent(traceparent)):
        with tracer.start_as_current_span("child", context=context) as child:
            assert child.get_span_context().trace_id == parent.get_span_context().trace_id
    tracing.shutdown()
    tracing.shutdown()


def test_off_by_default_and_malformed_context_is_none() -> None:
    tracing = configure_tracing(TraceSettings(), service="s", instance_id="i")
    assert not tracing.enabled
    with tracing.tracer("t").start_as_current_span("x"):
        assert inject() == []
        assert inject_traceparent() == ""
    assert not extract([("traceparent", "00-zz"), ("traceparent-bin", b"\0")])
    assert not extract_traceparent("")
    assert not extract(None)


def test_an_otlp_protocol_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_PROTOCOL='http/protobuf'"):
        configure_tracing(TraceSettings(exporter="otlp"), service="s", instance_id="i")
