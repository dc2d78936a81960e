"""What a collector gets: one connected trace of a split request, whose stages add up to what its client waited, and every service's metrics."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from fleet import MODEL, Fleet, wait_for
from otlp import Receiver, Span

from baton.servicekit.metrics import INSTRUMENTS
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.integration

ON = ("--traces-exporter", "otlp", "--metrics-exporter", "otlp")
#: Of a prompt; each begins with a number of its own, so that no prefix cache has any of it.
NUM_PROMPT = 300
_FIRST = itertools.count(5000)
NUM_TOKENS = 48
PART_NAME = "transfer part"
#: How far the stages may be from the whole.
PART = 0.05
#: Between two services' clocks of one machine, and what a span's own making takes.
NOISE_S = 0.002


@pytest.fixture(scope="module")
def stack(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Receiver]]:
    receiver = Receiver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
        fleet = Fleet(model_path, tmp_path_factory.mktemp("otlp"))
        fleet.prefill("--max-batched-tokens", "64", *ON)
        fleet.decode(*ON)
        fleet.start(*ON)
    yield fleet, receiver
    fleet.close()
    receiver.close()


def new_prompt() -> list[int]:
    return [next(_FIRST), *range(101, 100 + NUM_PROMPT)]


class Asked:
    """One request under a trace of its client's, and what its client saw."""

    def __init__(self, fleet: Fleet) -> None:
        self.trace_id, self.parent_id = secrets.token_hex(16), secrets.token_hex(8)
        sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=new_prompt()), sampling=sampling, report=True)
        metadata = (("traceparent", f"00-{self.trace_id}-{self.parent_id}-01"),)
        with grpc.insecure_channel(fleet.grpc) as channel:
            grpc.channel_ready_future(channel).result(10)
            began = time.monotonic()
            *_, last = InferenceStub(channel).Generate(request, timeout=60, metadata=metadata)
            self.waited_s = time.monotonic() - began
        self.report = last.report


def trace_of(receiver: Receiver, asked: Asked) -> dict[str, Span]:
    """The spans of a request by name, once all of them came, without the transfer's parts."""
    names = {"request", "prefill room", "transfer", "decode room"}
    wait_for(lambda: {span.name for span in receiver.spans(asked.trace_id)} >= names, 20, lambda: f"spans {receiver.spans(asked.trace_id)}")
    spans = [span for span in receiver.spans(asked.trace_id) if span.name != PART_NAME]
    assert sorted(span.name for span in spans) == sorted(names)
    return {span.name: span for span in spans}


def test_one_connected_trace_through_all_services(stack: tuple[Fleet, Receiver]) -> None:
    fleet, receiver = stack
    asked = Asked(fleet)
    spans = trace_of(receiver, asked)
    request, prefill, transfer, decode = (spans[name] for name in ("request", "prefill room", "transfer", "decode room"))
    assert [span.service for span in (request, prefill, transfer, decode)] == ["baton-gateway", "baton-prefill", "baton-prefill", "baton-decode"]
    assert request.parent_id == asked.parent_id
    assert (prefill.parent_id, decode.parent_id, transfer.parent_id) == (request.span_id, request.span_id, prefill.span_id)
    assert {span.attributes["baton.room"] for span in (request, prefill, decode)} == {str(asked.report.room)}
    assert (prefill.instance_id, decode.instance_id) == (asked.report.prefill_instance, asked.report.decode_instance)
    states = [name for name, _ in request.events if name.isupper()]
    assert states == ["BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS"]
    assert [name for name, _ in prefill.events] == ["Bootstrapped", "PrefillStarted", "TransferStarted", "Transferred"]
    assert [name for name, _ in decode.events] == ["Reserved", "KVReady", "Finished"]
    told = asked.report.transfer
    assert transfer.attributes["baton.transport"] == told.transport
    assert (transfer.attributes["baton.bytes"], transfer.attributes["baton.puts"]) == (told.bytes, told.puts)
    assert transfer.end - transfer.begin == pytest.approx(told.duration_ms / 1e3, abs=NOISE_S)
    for span in (prefill, transfer, decode):
        assert span.begin >= request.begin - NOISE_S
        assert span.end <= request.end + NOISE_S or span is not decode


def test_a_transfer_has_a_span_for_each_group_of_layers_and_queue(stack: tuple[Fleet, Receiver]) -> None:
    """The prompt is computed in five chunks of the model's 30 layers each."""
    fleet, receiver = stack
    asked = Asked(fleet)
    transfer, told = trace_of(receiver, asked)["transfer"], asked.report.transfer
    parts = sorted((span for span in receiver.spans(asked.trace_id) if span.name == PART_NAME), key=lambda span: span.begin)
    assert len(parts) == len(told.parts)
    assert [(part.attributes["baton.first_layer"], part.attributes["baton.layers"]) for part in parts] == [
        (one.first_layer, one.num_layers) for one in told.parts
    ]
    assert sum(part.attributes["baton.layers"] for part in parts) == 5 * 30
    assert sum(part.attributes["baton.bytes"] for part in parts) == told.bytes
    assert {part.attributes["baton.queue"] for part in parts} == {0}
    for part in parts:
        assert part.parent_id == transfer.span_id
        assert transfer.begin - NOISE_S <= part.begin <= part.end <= transfer.end + NOISE_S
    assert parts[-1].begin > parts[0].end  # they follow the computing


def stages_of(spans: dict[str, Span]) -> dict[str, float]:
    """Seconds, each of them said by the service in which it passed: not one clock read twice."""
    request, prefill, decode = spans["request"], spans["prefill room"], spans["decode room"]
    return {
        "until a room is opened, at the gateway": request.at("BOOTSTRAPPING") - request.begin,
        "until decode's pages are known, at prefill": prefill.at("Bootstrapped") - prefill.begin,
        "until the first page is written, at prefill": prefill.at("TransferStarted") - prefill.at("Bootstrapped"),
        "until all are written, at prefill": prefill.at("Transferred") - prefill.at("TransferStarted"),
        "the answer, at decode": decode.at("Finished") - decode.at("KVReady"),
    }


def test_the_stages_add_up_to_what_the_client_waited(stack: tuple[Fleet, Receiver]) -> None:
    """On a machine with other work a process may be kept waiting between two stages, which is nobody's stage: the best of some requests counts."""
    fleet, receiver = stack
    off = []
    for _ in range(6):
        asked = Asked(fleet)
        spans = trace_of(receiver, asked)
        request = spans["request"]
        # The gateway's own view has no gaps: each state ends where the next begins.
        reported = sum(state.duration_ms for state in asked.report.states) / 1e3 + asked.report.states[0].start_ms / 1e3
        assert reported == pytest.approx(request.end - request.begin, rel=PART, abs=2 * NOISE_S)
        off.append(abs(sum(stages_of(spans).values()) / asked.waited_s - 1))
        if off[-1] <= PART:
            return
    raise AssertionError(f"the stages are {min(off):.1%} off what the client waited at best, {PART:.0%} are allowed: {stages_of(spans)}")


def test_metrics_are_pushed(stack: tuple[Fleet, Receiver]) -> None:
    fleet, receiver = stack
    Asked(fleet)
    for service, role in (("baton-gateway", "gateway"), ("baton-prefill", "prefill"), ("baton-decode", "decode")):
        wanted = {(service, one.name) for one in INSTRUMENTS if one.always and role in one.roles}
        wait_for(lambda wanted=wanted: wanted <= receiver.metrics(), 20, lambda wanted=wanted: f"pushed: {wanted - receiver.metrics()}")

    def gaps() -> int:
        return sum(point.count for point in receiver.points("baton-gateway", "baton.request.inter_token_latency"))

    wait_for(lambda: gaps() > 0 and gaps() % (NUM_TOKENS - 1) == 0, 20, lambda: f"{gaps()} gaps")
    (point,) = receiver.points("baton-gateway", "baton.request.inter_token_latency")
    assert sum(point.bucket_counts) == point.count
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert 0 <= point.min <= point.sum / point.count <= point.max
    assert {one for one in receiver.metrics() if one[1] not in {instrument.name for instrument in INSTRUMENTS}} == set()


def test_what_fails_is_traced_although_its_client_did_not_ask_for_it(stack: tuple[Fleet, Receiver]) -> None:
    """The context that comes in says "not sampled": of two such requests the one that runs into its deadline is exported, by all who had a part."""
    fleet, receiver = stack
    well, late = Unsampled(fleet, 4, 60_000), Unsampled(fleet, 1500, 1_000)
    assert (well.status, late.status) == (200, 504)
    names = {"request", "decode room", "prefill room"}
    wait_for(lambda: {span.name for span in receiver.spans(late.trace_id)} >= names, 20, lambda: f"spans {receiver.spans(late.trace_id)}")
    spans = {span.name: span for span in receiver.spans(late.trace_id)}
    assert spans["request"].parent_id == late.parent_id
    assert spans["decode room"].parent_id == spans["prefill room"].parent_id == spans["request"].span_id
    # Prefill's part may have gone well before the deadline came, or not: either way it is there.
    assert spans.keys() <= names | {"transfer", "transfer part", "room failed elsewhere"}
    assert receiver.spans(well.trace_id) == []


class Unsampled:
    """A request over HTTP whose client does not have it traced."""

    def __init__(self, fleet: Fleet, num_tokens: int, timeout_ms: int) -> None:
        self.trace_id, self.parent_id = secrets.token_hex(16), secrets.token_hex(8)
        body = {"model": MODEL, "prompt": new_prompt(), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        headers = {"traceparent": f"00-{self.trace_id}-{self.parent_id}-00", "x-request-timeout-ms": str(timeout_ms)}
        self.status = httpx.post(f"http://{fleet.http}/v1/completions", json=body, headers=headers, timeout=60).status_code
