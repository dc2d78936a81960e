"""A real Prometheus scrapes a running stack: what it finds is the table of instruments, in both directions, and says what has happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fleet import MODEL, Fleet, wait_for
from prometheus import Prometheus, why_not

from baton.servicekit.metrics import INSTRUMENTS, Instrument
from baton.servicekit.metrics.instruments import GPU_INDEX, OTHER, PEER_INSTANCE
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.integration

ON = ("--metrics-exporter", "prometheus", "--metrics-port", "0")
NUM_ANSWERS = 4
NUM_TOKENS = 12
#: One for each answer, so that no prefix cache has any of it.
PROMPTS = [list(range(first, first + 40)) for first in range(5000, 5000 + 100 * NUM_ANSWERS, 100)]
#: What nothing here makes a service count, and why.
ABSENT = {
    "baton.gpu.memory.used": "needs a GPU",
    "baton.gpu.memory.limit": "needs a GPU",
    "baton.gpu.utilization": "needs a GPU",
    "baton.gpu.energy": "needs a GPU",
    "baton.step.launches": "needs a GPU",
    "baton.rooms.retried": "needs a second pair: test_retry.py",
    "baton.rooms.refused": "a gateway sends nothing that is refused: the room's own tests",
    "baton.publications.declined": "a fault: test_fault_table.py",
    "baton.digest.wait": "digests are off: the rooms' own tests",
    "baton.leases.ignored": "a fault: the room's own tests",
}


def ask(fleet: Fleet, prompt: list[int], model: str = MODEL) -> grpc.RpcError | int:
    """Tokens that came, or how it failed."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with grpc.insecure_channel(fleet.grpc) as channel:
        request = pb.GenerateRequest(model=model, token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        try:
            return sum(len(message.token_ids) for message in InferenceStub(channel).Generate(request, timeout=60))
        except grpc.RpcError as error:
            return error


@pytest.fixture(scope="module")
def stack(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Prometheus]]:
    """A pair behind its gateway, which has answered a few requests, refused one, and lost a client; and a plain server that has been idle."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("metrics")
    fleet = Fleet(model_path, folder / "fleet")
    prefill, decode = fleet.prefill("--max-batched-tokens", "256", *ON), fleet.decode(*ON)
    fleet.start(*ON)
    plain = fleet.plain(*ON).start().wait_ready()
    fleet.note_pids()
    assert fleet.gateway is not None
    targets = {role: worker.address("metrics") for role, worker in
               {"gateway": fleet.gateway, "prefill": prefill, "decode": decode, "plain": plain}.items()}  # fmt: skip
    prometheus = Prometheus(targets, folder / "prometheus")
    try:
        assert [ask(fleet, prompt) for prompt in PROMPTS] == [NUM_TOKENS] * NUM_ANSWERS
        assert isinstance(ask(fleet, PROMPTS[0], model="no-such-model"), grpc.RpcError)
        leave(fleet)
        fleet.assert_free()
        wait_for(lambda: value(prometheus, "sum(baton_rooms_failed_total)") == 3, 30, lambda: f"{prometheus.ask('baton_rooms_failed_total > 0')}")
        yield fleet, prometheus
    finally:
        prometheus.close()
    fleet.close()


def leave(fleet: Fleet) -> None:
    """A client that goes away while its pages are written."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    with grpc.insecure_channel(fleet.grpc) as channel:
        call = InferenceStub(channel).Generate(
            pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=list(range(100, 4100))), sampling=sampling), timeout=60
        )
        next(iter(call))
        decode, prefill = fleet.by_kind("decode"), fleet.by_kind("prefill")
        wait_for(lambda: decode.info().load.published_pages > 0, 10, "pages published")
        steps = prefill.info().load.steps
        wait_for(lambda: prefill.info().load.steps > steps + 1, 20, "a chunk computed")
        call.cancel()


def value(prometheus: Prometheus, expression: str) -> float:
    found = prometheus.ask(expression)
    assert len(found) <= 1, found
    return found[0][1] if found else 0.0


def names_of(instrument: Instrument) -> set[str]:
    name = instrument.prometheus
    return {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if instrument.kind == "histogram" else {name}


def test_every_series_is_in_the_table(stack: tuple[Fleet, Prometheus]) -> None:
    by_name = {name: instrument for instrument in INSTRUMENTS for name in names_of(instrument)}
    found = stack[1].series()
    assert len(found) > 300
    for series in found:
        instrument = by_name[series["__name__"]]
        labels = {label: said for label, said in series.items() if label not in ("__name__", "job", "instance", "le")}
        assert labels.pop("role") == series["job"], series
        assert series["job"] in instrument.roles, series
        assert labels.keys() == instrument.labels.keys(), series
        for label, said in labels.items():
            allowed = instrument.labels[label]
            assert said in (*allowed, OTHER) or allowed in (PEER_INSTANCE, GPU_INDEX), series


def test_everything_in_the_table_is_scraped(stack: tuple[Fleet, Prometheus]) -> None:
    seen = {(series["__name__"], series["job"]) for series in stack[1].series()}
    for instrument in INSTRUMENTS:
        for name in names_of(instrument):
            roles = {role for role in instrument.roles if (name, role) in seen}
            if instrument.always:
                assert roles == set(instrument.roles), f"{name} is not scraped from {set(instrument.roles) - roles}"
            else:
                assert roles or instrument.name in ABSENT, f"{name} is in the table, and nobody has it"


def test_numbers_are_what_has_happened(stack: tuple[Fleet, Prometheus]) -> None:
    fleet, prometheus = stack

    def is_(expected: float, expression: str) -> None:
        assert value(prometheus, expression) == expected, f"{expression}: {prometheus.ask(expression)}"

    is_(NUM_ANSWERS, 'baton_requests_ended_total{outcome="success"}')
    is_(1, 'baton_requests_ended_total{outcome="left"}')
    is_(0, 'baton_requests_ended_total{outcome="failed"}')
    is_(1, 'baton_requests_refused_total{cause="model_not_found"}')
    is_(NUM_ANSWERS, "baton_request_time_to_first_token_seconds_count")
    is_(NUM_ANSWERS * (NUM_TOKENS - 1), "baton_request_inter_token_latency_seconds_count")
    is_(NUM_ANSWERS * NUM_TOKENS, "baton_tokens_completion_total")
    is_(sum(map(len, PROMPTS)) + 4000, "baton_tokens_prompt_total")
    for role in ("gateway", "prefill", "decode"):
        is_(NUM_ANSWERS, f'baton_rooms_succeeded_total{{role="{role}"}}')
        is_(1, f'baton_transfer_failed_total{{role="{role}",origin="client",cause="client_gone"}}')
        is_(0, f'sum(baton_bootstrap_failed_total{{role="{role}"}})')
    for part in ("duration_seconds", "speed_bytes_per_second", "size_bytes", "puts", "put_size_bytes", "exposed_seconds"):
        is_(NUM_ANSWERS, f"sum(baton_transfer_{part}_count)")
    page_bytes = 2 * 30 * 3 * 64 * 16 * 4  # keys and values, layers, heads, head_dim, page size, float32
    pages = sum(-(-len(prompt) // 16) for prompt in PROMPTS)
    is_(pages * page_bytes, "sum(baton_transfer_size_bytes_sum)")
    is_(NUM_ANSWERS, 'baton_leases_ended_total{outcome="landed"}')
    is_(NUM_ANSWERS, "sum(baton_landing_exposed_seconds_count)")
    for role, kind in (("prefill", "prefill"), ("decode", "decode"), ("plain", "plain")):
        load = fleet.by_kind(kind).info().load
        is_(load.total_pages, f'sum(baton_kv_pages{{role="{role}"}})')
        is_(load.free_pages, f'sum(baton_kv_pages{{role="{role}",state=~"free|cached"}})')
        is_(load.cached_pages, f'baton_kv_pages{{role="{role}",state="cached"}}')
        if role != "prefill":  # a step that was given up is none
            is_(load.steps, f'baton_step_duration_seconds_count{{role="{role}"}}')
    is_(NUM_ANSWERS * (NUM_TOKENS - 1), 'baton_step_tokens_sum{role="decode"}')
    is_(1, 'baton_peers{state="connected"}')
    assert value(prometheus, "baton_peer_speed_bytes_per_second") > 1e6
    stages = "sum(baton_request_stage_duration_seconds_sum)"
    assert value(prometheus, stages) == pytest.approx(value(prometheus, 'sum(baton_request_duration_seconds_sum{outcome="success"})'), rel=0.01)
