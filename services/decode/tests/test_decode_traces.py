"""Spans of both workers hang on the gateway's."""

from __future__ import annotations

import json
import re

from opentelemetry import trace

from baton.servicekit import TraceSettings, configure_tracing, inject_traceparent


async def test_one_trace_through_prefill_and_decode(fleet, leg_type, pair_type, prompts, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    tracing = configure_tracing(TraceSettings(exporter="console"), service="test", instance_id="test")
    with tracing.tracer("test").start_as_current_span("request") as span:
        traceparent = inject_traceparent()
    async with leg_type(fleet.prefill().wait_ready()) as first, leg_type(fleet.decode().wait_ready()) as second:
        pair = pair_type(first, second)
        await pair.connect()
        number = pair.draw()
        legs = [
            await pair.start_prefill(number, prompts(20), 3, traceparent=traceparent),
            await pair.start_decode(number, prompts(20), 3, traceparent=traceparent),
        ]
        for leg in legs:
            await leg.until_over()
    for leg, last in ((first, "Transferred"), (second, "Finished")):
        assert leg.server.stop() == 0
        spans = {span["name"]: span for span in (json.loads(text) for text in re.findall(r"^\{\n.*?^\}", leg.server.log, re.DOTALL | re.MULTILINE))}
        room = next(span for name, span in spans.items() if name.endswith(" room"))
        assert spans.keys() - {room["name"]} == ({"transfer", "transfer part"} if leg is first else set())
        assert leg is not first or spans["transfer"]["parent_id"] == room["context"]["span_id"]
        assert leg is not first or spans["transfer part"]["parent_id"] == spans["transfer"]["context"]["span_id"]
        assert room["context"]["trace_id"] == f"0x{trace.format_trace_id(span.get_span_context().trace_id)}"
        assert room["parent_id"] == f"0x{trace.format_span_id(span.get_span_context().span_id)}"
        assert room["attributes"]["baton.room"] == str(number)
        assert [event["name"] for event in room["events"]][-1] == last
        assert room["resource"]["attributes"]["service.instance.id"] == leg.server.instance_id
