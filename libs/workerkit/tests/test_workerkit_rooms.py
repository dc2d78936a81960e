"""Stages, limits and single use, without a clock or a network."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import INVALID_SPAN

from baton.engine.fingerprint import Fingerprint
from baton.engine.types import (
    Bootstrapped,
    EngineStats,
    Failed,
    Failure,
    KVReady,
    PrefillStarted,
    Request,
    Reserved,
    Role,
    SamplingParams,
    Transferred,
    TransferStarted,
    TransferStats,
)
from baton.servicekit.failed_traces import FailedTraces, RecordAll
from baton.wire.v1 import common_pb2, worker_pb2
from baton.workerkit import Limits, Reaper, RefusedError, differences, fingerprint_to_wire
from baton.workerkit.convert import event_to_wire, failure_from_wire, failure_to_wire, load_to_wire
from baton.workerkit.ended_legs import MAX_LEGS, EndedLegs
from baton.workerkit.intake import DecodePeer, PrefillPeer, take
from baton.workerkit.rooms import OpenRoom, RoomTable, ends, open_room


def entry(*, deadline: float | None = None, bootstrap: float | None = None, waiting_s: float = 0.0, room: int = 1) -> OpenRoom[str]:
    request = Request(room, [1], SamplingParams(), deadline=deadline, bootstrap_deadline=bootstrap, arrived=0.0)
    return OpenRoom(request, "owner", INVALID_SPAN, waiting_s, stage_deadline=bootstrap)


def test_prefill_has_a_limit_for_each_stage() -> None:
    room = entry(deadline=100.0, bootstrap=5.0, waiting_s=7.0)
    assert room.due() == 5.0
    room.advance(Bootstrapped(1), Role.PREFILL, 2.0)
    assert room.due() == 9.0
    failure = room.expired(9.0, Role.PREFILL)
    assert failure is not None
    assert (failure.cause, room.allowed_ms) == ("waiting_timeout", 9000)
    room.advance(TransferStarted(1), Role.PREFILL, 3.0)
    assert room.due() == 100.0
    assert room.expired(99.0, Role.PREFILL) is None
    failure = room.expired(100.0, Role.PREFILL)
    assert failure is not None
    assert failure.cause == "deadline"


def test_decode_grants_what_prefill_may_spend() -> None:
    room = entry(bootstrap=5.0, waiting_s=7.0)
    room.advance(Reserved(1, 2, 0), Role.DECODE, 1.0)
    assert room.due() == 12.0
    room.advance(KVReady(1, True, 0.0, 5), Role.DECODE, 3.0)
    assert room.due() is None


def test_a_late_milestone_does_not_lead_back() -> None:
    room = entry(waiting_s=7.0)
    room.advance(TransferStarted(1), Role.PREFILL, 1.0)
    room.advance(Bootstrapped(1), Role.PREFILL, 2.0)
    assert room.stage == common_pb2.ROOM_STATE_TRANSFERRING
    assert room.due() is None


def test_ended_rooms_are_remembered_up_to_a_bound() -> None:
    table: RoomTable[str] = RoomTable(num_tombstones=2)
    for number in (1, 2, 3):
        table.add(entry(room=number))
        table.remove(number)
        table.remove(number)
    assert [table.was_used(number) for number in (1, 2, 3)] == [False, True, True]
    assert len(table) == 0


def test_a_leg_that_ended_well_is_traced_when_its_room_fails_elsewhere() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=RecordAll(ALWAYS_OFF))
    provider.add_span_processor(FailedTraces(SimpleSpanProcessor(exporter)))
    tracer = provider.get_tracer("test")
    legs = EndedLegs(tracer)
    for room in range(MAX_LEGS + 2):
        span = tracer.start_span(f"leg {room}")
        legs.add(room, span)
        span.end()
    lost, gone = Failure("UNAVAILABLE", "decode", "decode_lost", ""), Failure("CANCELLED", "client", "client_gone", "")
    told = {room: legs.failed(room, failure) for room, failure in ((1, lost), (MAX_LEGS, gone), (MAX_LEGS + 1, lost))}
    assert told == {1: False, MAX_LEGS: True, MAX_LEGS + 1: True}  # the oldest two were forgotten; nobody failed a client that left
    leg, word = exporter.get_finished_spans()
    assert (leg.name, word.name) == (f"leg {MAX_LEGS + 1}", "room failed elsewhere")
    assert word.parent is not None
    assert leg.context is not None
    assert (word.parent.trace_id, word.parent.span_id) == (leg.context.trace_id, leg.context.span_id)
    assert not legs.failed(MAX_LEGS + 1, lost)


def test_a_rooms_lines_name_its_other_half_and_its_trace() -> None:
    span = TracerProvider().get_tracer("test").start_span("leg")
    for peer, name in ((PrefillPeer("decode-7"), "decode-7"), (DecodePeer("there:1", "prefill-7"), "prefill-7")):
        named = OpenRoom(Request(5, [1], SamplingParams(), peer=peer), "owner", span, 0.0).names()
        assert named.pop("span_id")
        assert named == {"room": 5, "peer": name, "trace_id": format(span.get_span_context().trace_id, "032x")}
    assert entry(room=6).names() == {"room": 6}


async def test_the_reaper_fires_in_order_and_each_once() -> None:
    fired: list[int] = []
    reaper = Reaper(fired.append)
    now = time.monotonic()
    reaper.watch(3, now + 0.15)
    reaper.watch(1, now + 0.05)
    reaper.watch(2, now + 0.10)
    reaper.watch(4, None)
    await asyncio.sleep(0.3)
    assert fired == [1, 2, 3]
    reaper.watch(5, time.monotonic() + 0.01)
    reaper.close()
    await asyncio.sleep(0.05)
    assert fired == [1, 2, 3]


def test_legs_become_peers() -> None:
    start = worker_pb2.Start(room=5, prompt_token_ids=[1], sampling=worker_pb2.Sampling(top_p=1, max_tokens=1), deadline_ms=2000)
    start.prefill.decode_instance_id = "decode-1"
    request = take(start, Limits(Role.PREFILL, 10, 64, 4, 16), now=10.0)
    assert (request.peer, request.deadline, request.bootstrap_deadline) == (PrefillPeer("decode-1"), 12.0, None)
    start.decode.bootstrap_address, start.decode.prefill_instance_id = "p:8998", "prefill-1"
    assert take(start, Limits(Role.DECODE, 10, 64, 4, 16), now=0.0).peer == DecodePeer("p:8998", "prefill-1")


def test_a_decode_server_takes_a_prompt_to_compute_only_when_it_is_told_so() -> None:
    start = worker_pb2.Start(room=5, prompt_token_ids=[1], sampling=worker_pb2.Sampling(top_p=1, max_tokens=1))
    start.decode.bootstrap_address, start.decode.prefill_instance_id = "p:8998", "prefill-1"
    assert not take(start, Limits(Role.DECODE, 10, 64, 4, 16), now=0.0).local
    start.local.SetInParent()
    request = take(start, Limits(Role.DECODE, 10, 64, 4, 16), now=0.0)
    assert (request.local, request.peer) == (True, None)
    for role in (Role.PREFILL, Role.PLAIN):
        with pytest.raises(RefusedError, match=f"leg=local was sent to a {role.value} server"):
            take(start, Limits(role, 10, 64, 4, 16), now=0.0)


def test_a_priority_shifts_a_rooms_turn_and_is_bounded():
    start = worker_pb2.Start(room=1, prompt_token_ids=[1], sampling=worker_pb2.Sampling(top_p=1.0, max_tokens=4), priority=-3)
    start.plain.SetInParent()
    assert take(start, Limits(Role.PLAIN, 10, 64, 4, 16), now=10.0).turn == 7.0
    start.priority = 101
    with pytest.raises(RefusedError, match=r"priority=101 is outside \[-100, 100\]"):
        take(start, Limits(Role.PLAIN, 10, 64, 4, 16), now=0.0)


def test_a_fork_is_taken_by_decode_and_plain_and_names_another_room():
    start = worker_pb2.Start(room=1, prompt_token_ids=[1, 2], sampling=worker_pb2.Sampling(top_p=1.0, max_tokens=4), forks=2)
    start.plain.SetInParent()
    source = take(start, Limits(Role.PLAIN, 10, 64, 4, 16), now=0.0)
    assert (source.num_forks, source.fork_of) == (2, 0)
    start.fork.of_room, start.forks = 7, 0
    for role in (Role.DECODE, Role.PLAIN):
        request = take(start, Limits(role, 10, 64, 4, 16), now=0.0)
        assert (request.fork_of, request.num_forks, request.local, request.peer) == (7, 0, True, None)
    with pytest.raises(RefusedError, match="leg=fork was sent to a prefill server"):
        take(start, Limits(Role.PREFILL, 10, 64, 4, 16), now=0.0)
    for room in (0, 1):
        start.fork.of_room = room
        with pytest.raises(RefusedError, match=f"fork.of_room={room} must be another room"):
            take(start, Limits(Role.DECODE, 10, 64, 4, 16), now=0.0)


def test_a_room_that_decode_prefills_itself_waits_only_until_that_begins() -> None:
    """Its pages are there, then its prompt is being computed: from then on the request's deadline alone counts."""
    request = Request(5, [1], SamplingParams(), deadline=100.0, bootstrap_deadline=10.0, arrived=0.0, local=True)
    room = open_room(request, "owner", INVALID_SPAN, Role.DECODE, waiting_s=5.0)
    assert (room.stage, room.due()) == (common_pb2.ROOM_STATE_BOOTSTRAPPING, 10.0)
    room.advance(Reserved(5, 1, 0), Role.DECODE, 1.0)
    assert (room.stage, room.due()) == (common_pb2.ROOM_STATE_WAITING, 15.0)
    room.advance(PrefillStarted(5), Role.DECODE, 2.0)
    assert (room.stage, room.due()) == (common_pb2.ROOM_STATE_SUCCESS, 100.0)


def test_load_tells_of_what_was_computed_again() -> None:
    stats = EngineStats(
        extra={"retractions": 2, "recomputed_tokens": 40, "local_prefills": 3, "prompt_tokens_per_s": 12.5, "pending_prompt_tokens": 7}
    )
    load = load_to_wire(stats, 0.0)
    assert (load.retractions, load.recomputed_tokens, load.local_prefills, load.prompt_tokens_per_s, load.pending_prompt_tokens) == (
        2,
        40,
        3,
        12.5,
        7,
    )


def test_a_prefill_pool_need_not_hold_the_answer() -> None:
    start = worker_pb2.Start(room=5, prompt_token_ids=[1] * 16, sampling=worker_pb2.Sampling(top_p=1, max_tokens=17))
    start.prefill.decode_instance_id = "decode-1"
    take(start, Limits(Role.PREFILL, 10, 64, num_pages=1, page_size=16), now=0.0)


def test_failures_survive_the_wire() -> None:
    failure = Failure("UNAVAILABLE", "prefill", "prefill_lost", "gone")
    assert failure_from_wire(failure_to_wire(failure), default_origin="gateway") == failure
    unknown = failure_from_wire(common_pb2.Failure(code=99, origin=77), default_origin="gateway")
    assert (unknown.code, unknown.origin, unknown.cause) == ("UNKNOWN", "gateway", "unknown")


def test_events_that_end_a_leg() -> None:
    stats = TransferStats("sysv", 10, 2, 0.5, 0.25, True)
    assert ends(Transferred(1, stats))
    assert ends(Failed(1, Failure("UNKNOWN", "decode", "x", "y")))
    assert not ends(KVReady(1, True, 0.0, 5))
    wire = event_to_wire(Transferred(1, stats), 3.0)
    assert (wire.transferred.transfer.bytes, wire.transferred.transfer.duration_ms, wire.at_ms) == (10, 500.0, 3.0)
    assert event_to_wire(Bootstrapped(1), 0).WhichOneof("event") == "bootstrapped"
    assert event_to_wire(KVReady(1, False, 0.0, 5), 0).kv_ready.first_token == 5


def test_fingerprints_name_both_values() -> None:
    ours = Fingerprint(1, "tiny", "abc", "float32", "layout", 2, 2, 8, 16)
    assert differences(fingerprint_to_wire(ours), fingerprint_to_wire(ours)) == []
    theirs = fingerprint_to_wire(replace(ours, dtype="bfloat16", page_size=32))
    assert differences(fingerprint_to_wire(ours), theirs) == ["dtype: 'float32' here, 'bfloat16' there", "page_size: '16' here, '32' there"]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_an_incomplete_leg_is_refused(leg: str) -> None:
    start = worker_pb2.Start(room=5, prompt_token_ids=[1], sampling=worker_pb2.Sampling(top_p=1, max_tokens=1))
    getattr(start, leg).SetInParent()
    with pytest.raises(RefusedError, match=r"is empty|must both be set"):
        take(start, Limits(Role(leg), 10, 64, 4, 16), now=0.0)
