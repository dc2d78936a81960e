"""Pure policy: routing, limits, admission, compatibility, the outbox."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.admission import admit
from baton.gateway.compatibility import differences
from baton.gateway.errors import EmptyPromptError, OutOfRangeError, OverloadedError, PromptTooLongError
from baton.gateway.limits import Limit, RouteLimits, limits_of
from baton.gateway.outbox import Outbox
from baton.gateway.requests import SamplingOptions
from baton.gateway.routing import Router
from baton.gateway.worker import Leg, Worker
from baton.wire.v1 import common_pb2, worker_pb2


@dataclass(frozen=True)
class Server:
    tokens_in_flight: int = 0
    free_pages: int = 100


@dataclass(frozen=True)
class Way:
    servers: tuple[Server, ...]
    limits: RouteLimits = field(default_factory=lambda: RouteLimits(Limit(100, "c"), Limit(99, "p")))


def test_least_load_goes_where_the_busier_server_is_least_busy() -> None:
    easy = Way((Server(50), Server(60)))
    hard = Way((Server(0), Server(90)))
    assert Router().choose([hard, easy]).route is easy


def test_of_equal_peaks_the_lighter_pair_then_the_emptier_pool_is_taken() -> None:
    assert Router().choose([Way((Server(5), Server(9))), light := Way((Server(1), Server(9)))]).route is light
    assert Router().choose([Way((Server(1, 10),)), empty := Way((Server(1, 20),))]).route is empty


@pytest.mark.parametrize("policy", ["least-load", "round-robin"])
def test_equal_routes_take_turns(policy: str) -> None:
    ways = [Way((Server(),)) for _ in range(3)]
    router = Router(policy)  # type: ignore[arg-type]
    seen = [id(router.choose(ways).route) for _ in range(6)]
    assert len(set(seen[:3])) == 3
    assert seen[:3] == seen[3:]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=10))
def test_least_load_never_takes_a_route_that_another_beats_outright(loads: list[tuple[int, int]]) -> None:
    ways = [Way((Server(prefill), Server(decode))) for prefill, decode in loads]
    chosen = Router().choose(ways).route
    assert not any(
        all(other.tokens_in_flight < mine.tokens_in_flight for other, mine in zip(way.servers, chosen.servers, strict=True)) for way in ways
    )


def worker(leg: Leg, *, context: int = 100, pages: int = 10, page_size: int = 16, **fingerprint: object) -> Worker:
    one = Worker("10.0.0.1:1", leg, min_vocab_size=1, stall_limit_s=30)
    one.came(
        worker_pb2.WorkerInfo(
            instance_id=f"{leg.value}-a",
            max_model_len=context,
            fingerprint=common_pb2.KVFingerprint(page_size=page_size, **fingerprint),  # type: ignore[arg-type]
            load=worker_pb2.WorkerLoad(total_pages=pages),
        )
    )
    return one


@pytest.mark.parametrize(
    ("prefill", "decode", "context", "prompt"),
    [
        ({}, {}, 100, 99),
        ({"context": 50}, {}, 50, 49),
        ({"pages": 2}, {}, 100, 32),
        ({}, {"pages": 2}, 32, 31),
        ({"pages": 3}, {"pages": 4}, 64, 48),
    ],
)
def test_the_tightest_of_both_sides_counts(prefill: dict[str, int], decode: dict[str, int], context: int, prompt: int) -> None:
    limits = limits_of((worker(Leg.PREFILL, **prefill), worker(Leg.DECODE, **decode)))  # type: ignore[arg-type]
    assert (limits.context.num_tokens, limits.prompt.num_tokens) == (context, prompt)


def ways(*limits: tuple[int, int]) -> list[Way]:
    return [Way((), RouteLimits(Limit(context, f"context {context}"), Limit(prompt, f"pool {prompt}"))) for context, prompt in limits]


def test_a_request_goes_only_where_it_fits() -> None:
    small, large = ways((20, 19), (100, 99))
    admitted, fitting = admit([1] * 10, "prompt", SamplingOptions(max_tokens=50), [small, large], [2])
    assert fitting == [large]
    assert admitted.sampling.max_tokens == 50
    _, fitting = admit([1] * 10, "prompt", SamplingOptions(max_tokens=10), [small, large], [2])
    assert fitting == [small, large]
    admitted, fitting = admit([1] * 10, "prompt", SamplingOptions(), [small, large], [2])
    assert (admitted.sampling.max_tokens, fitting) == (90, [large])


@given(
    st.integers(0, 130),
    st.one_of(st.none(), st.integers(1, 130)),
    st.lists(st.tuples(st.integers(2, 120), st.integers(1, 119)), min_size=1, max_size=4),
)
def test_what_is_admitted_fits_every_route_that_is_left(num_tokens: int, max_tokens: int | None, limits: list[tuple[int, int]]) -> None:
    routes = ways(*((context, min(prompt, context - 1)) for context, prompt in limits))

    def fits(way: Way, answer: int) -> bool:
        return num_tokens <= way.limits.prompt.num_tokens and num_tokens + answer <= way.limits.context.num_tokens

    try:
        admitted, fitting = admit([1] * num_tokens, "prompt", SamplingOptions(max_tokens=max_tokens), routes, [2])
    except EmptyPromptError:
        assert num_tokens == 0
    except PromptTooLongError:
        assert not any(fits(way, 1) for way in routes)
    except OutOfRangeError:
        assert max_tokens is not None
        assert not any(fits(way, max_tokens) for way in routes)
    else:
        assert fitting == [way for way in routes if fits(way, admitted.sampling.max_tokens)]
        assert fitting


@pytest.mark.parametrize("field", [field.name for field in common_pb2.KVFingerprint.DESCRIPTOR.fields])
def test_every_field_of_the_fingerprint_is_compared(field: str) -> None:
    kind = common_pb2.KVFingerprint.DESCRIPTOR.fields_by_name[field].cpp_type
    ours, theirs = ("a", "b") if kind == 9 else (1, 2)
    prefill = worker_pb2.WorkerInfo(instance_id="p-1", fingerprint=common_pb2.KVFingerprint(**{field: ours}))  # type: ignore[arg-type]
    decode = worker_pb2.WorkerInfo(instance_id="d-1", fingerprint=common_pb2.KVFingerprint(**{field: theirs}))  # type: ignore[arg-type]
    assert differences(prefill, decode) == [f"{field}: {ours!r} at p-1, {theirs!r} at d-1"]
    assert differences(prefill, prefill) == []


async def test_the_outbox_keeps_order_and_takes_back_what_was_not_sent() -> None:
    outbox = Outbox(3)
    for room in (1, 2, 3):
        outbox.put_start(worker_pb2.Start(room=room))
    with pytest.raises(OverloadedError, match="limit is 3"):
        outbox.put_start(worker_pb2.Start(room=4))
    outbox.put_abort(2, common_pb2.Failure(cause="gone"))  # never sent: taken back
    outbox.put_abort(9, common_pb2.Failure(cause="gone"))  # sent earlier
    outbox.put_peers(["a"])
    outbox.put_peers(["a", "b"])
    commands = [await outbox.take() for _ in range(4)]
    assert [command.WhichOneof("command") for command in commands] == ["peers", "abort", "start", "start"]
    assert list(commands[0].peers.bootstrap_addresses) == ["a", "b"]
    assert commands[1].abort.room == 9
    assert [commands[2].start.room, commands[3].start.room] == [1, 3]
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put_start(worker_pb2.Start(room=5))
    assert (await waiting).start.room == 5
