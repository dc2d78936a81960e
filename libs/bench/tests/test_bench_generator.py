"""The generator against real servers that answer by a known schedule: its numbers must be theirs."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from bench_scheduled_server import GrpcServer, HttpServer, Schedule, grpc_server, http_server

from baton.bench.arrivals import ArrivalOptions, Arrivals, ClosedLoop, TraceArrivals
from baton.bench.compare_runs import compare_runs
from baton.bench.errors import SettingError
from baton.bench.generator import Generator, Limits
from baton.bench.measures import gaps_s, split_by_prefill, ttft_s
from baton.bench.request import Message, Request
from baton.bench.runfile import load_run
from baton.bench.sample import Sample
from baton.bench.session import Contestant, Plan, measure
from baton.bench.summary import summarise
from baton.bench.targets import Api, Asking, open_target
from baton.bench.workload import WorkloadOptions

#: Medians may differ by this from the server's own stamps, beyond the lag that the generator itself reports for the event loop that they share.
TOLERANCE_S = 0.015
KINDS: list[tuple[str, Api]] = [("grpc", "completions"), ("grpc", "chat"), ("http", "completions"), ("http", "chat")]


def request(index: int, text: str = "a short question") -> Request:
    return Request(index, "chat", (Message("user", text),), max_tokens=6, is_long=len(text) > 1000)


async def drive(
    kind: str, api: Api, requests: Sequence[Request], arrivals: Arrivals, schedule: Schedule | None = None, limits: Limits | None = None
) -> tuple[list[Sample], Schedule, HttpServer, list[float]]:
    schedule = schedule or Schedule()
    http = HttpServer(schedule)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(grpc_server(schedule) if kind == "grpc" else http_server(http))
        target = open_target(url, api, Asking("model"))
        stack.push_async_callback(target.aclose)
        seen: list[Sample] = []
        generator = Generator(target, limits or Limits(), 0, is_warm_up=False, on_done=seen.append)
        measured = await generator.run(requests, arrivals)
        assert seen == measured.samples
        assert measured.loop_lag_s
    return sorted(measured.samples, key=lambda sample: sample.index), schedule, http, measured.loop_lag_s


@pytest.mark.parametrize(("kind", "api"), KINDS)
async def test_its_numbers_are_those_of_the_schedule(kind: str, api: Api) -> None:
    times_s = tuple(0.05 * index for index in range(8))
    samples, schedule, _, loop_lag_s = await drive(kind, api, [request(index) for index in range(8)], TraceArrivals(times_s), Schedule(gap_s=0.06))
    allowed_s = TOLERANCE_S + statistics.quantiles(loop_lag_s, n=10)[-1]
    assert [sample.error for sample in samples] == [None] * 8
    assert {(sample.text, sample.output_tokens, sample.finish, sample.prompt_tokens) for sample in samples} == {(" word" * 6, 6, "length", 5)}
    assert [len(sample.token_s) for sample in samples] == [6] * 8
    assert all(sample.sent_s >= sample.scheduled_s for sample in samples)
    assert statistics.median(sample.lag_s for sample in samples) < allowed_s
    served_ttft = statistics.median(sent_s[0] - arrived_s for arrived_s, sent_s in schedule.log)
    served_gap = statistics.median(later - earlier for _, sent_s in schedule.log for earlier, later in pairwise(sent_s))
    found_ttft = statistics.median(ttft_s(sample) or 0.0 for sample in samples[1:])
    found_gap = statistics.median(gap for sample in samples for gap in gaps_s(sample))
    assert schedule.first_s <= served_ttft
    assert found_ttft == pytest.approx(served_ttft, abs=allowed_s)
    assert found_gap == pytest.approx(served_gap, abs=allowed_s)
    if kind == "grpc":
        moved = {"kv_bytes": 4096, "kv_puts": 3, "transfer_ms": 2.0, "transfer_exposed_ms": 0.5}
        assert samples[0].server == {"server_ttft_ms": 60.0, "cached_tokens": 2} | moved
    else:
        assert samples[0].server == {"cached_tokens": 2}


async def test_http_asks_for_what_an_openai_server_knows() -> None:
    _, _, http, _ = await drive("http", "chat", [request(0)], ClosedLoop(1))
    assert http.bodies[0] == {
        "model": "model",
        "temperature": 0.0,
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "a short question"}],
    }


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_an_open_loop_does_not_wait_for_answers(kind: str) -> None:
    schedule = Schedule(first_s=0.5, num_tokens=1)
    samples, *_ = await drive(kind, "completions", [request(index) for index in range(5)], TraceArrivals((0.0, 0.02, 0.04, 0.06, 0.08)), schedule)
    assert max(sample.sent_s for sample in samples) < min(sample.ended_s for sample in samples)


async def test_a_closed_loop_never_has_more_under_way_than_clients() -> None:
    samples, *_ = await drive("grpc", "completions", [request(index) for index in range(7)], ClosedLoop(2, think_s=0.05), Schedule(num_tokens=2))
    for sample in samples:
        under_way = [other for other in samples if other.sent_s < sample.ended_s and other.ended_s > sample.sent_s]
        assert len([other for other in under_way if other.sent_s <= sample.sent_s]) <= 2
    ends = sorted(sample.ended_s for sample in samples)
    assert samples[2].scheduled_s == pytest.approx(ends[0] + 0.05, abs=1e-6)
    assert samples[2].sent_s >= samples[2].scheduled_s


async def test_a_long_prompt_shows_in_the_gaps_of_the_others() -> None:
    """The server of the schedule holds back every stream during a long prefill, as one without a split may."""
    requests = [request(0), request(1), request(2, "long " * 400)]
    samples, schedule, *_ = await drive("grpc", "completions", requests, TraceArrivals((0.0, 0.0, 0.12)), Schedule(num_tokens=8))
    split = split_by_prefill(samples)
    assert max(split.during_s) > 0.7 * schedule.long_first_s
    assert statistics.median(split.without_s) < 0.5 * schedule.long_first_s


@pytest.mark.parametrize(("kind", "cause", "detail"), [("grpc", "resource_exhausted", "no room"), ("http", "http_503", "full")])
async def test_a_refusal_is_a_sample_with_its_cause(kind: str, cause: str, detail: str) -> None:
    samples, *_ = await drive(kind, "completions", [request(0, "Refuse this"), request(1)], ClosedLoop(1))
    assert [(sample.error, sample.error_detail) for sample in samples] == [(cause, detail), (None, "")]


async def test_a_stream_that_ends_early_is_not_a_success() -> None:
    samples, *_ = await drive("http", "completions", [request(0, "Cut this")], ClosedLoop(1))
    assert samples[0].error == "cut_short"
    assert len(samples[0].token_s) == 6


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_a_timeout_ends_the_request_at_the_server_too(kind: str) -> None:
    schedule = Schedule(gap_s=0.1, num_tokens=100)
    started_s = time.perf_counter()
    samples, *_ = await drive(kind, "completions", [request(0)], ClosedLoop(1), schedule, Limits(timeout_s=0.4))
    assert (samples[0].error, samples[0].error_detail) == ("timeout", "no end after 0.4 s")
    assert samples[0].token_s
    for _ in range(40):
        await asyncio.sleep(0.05)
        if schedule.num_cancelled or len(schedule.log[0][1]) > 60:
            break
    assert time.perf_counter() - started_s < 5
    assert len(schedule.log[0][1]) < 50


@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_a_server_that_is_not_there_is_a_cause(kind: str, closed_port: int) -> None:
    target = open_target(f"grpc://127.0.0.1:{closed_port}" if kind == "grpc" else f"http://127.0.0.1:{closed_port}/v1", "completions", Asking("m"))
    measured = await Generator(target, Limits(timeout_s=20), 0, is_warm_up=False, on_done=lambda _: None).run([request(0)], ClosedLoop(1))
    await target.aclose()
    assert measured.samples[0].error == ("unavailable" if kind == "grpc" else "connect")


async def test_more_than_may_be_in_flight_fails_unsent() -> None:
    samples, schedule, *_ = await drive(
        "grpc", "completions", [request(index) for index in range(4)], TraceArrivals((0.0, 0.0, 0.0, 0.0)), limits=Limits(max_in_flight=3)
    )
    assert [sample.error for sample in samples] == [None, None, None, "not_sent"]
    assert len(schedule.log) == 3


class _Blocking(GrpcServer):
    """Holds the event loop that it shares with the generator: what a generator too busy looks like."""

    async def _answer(self, prompt: str):
        time.sleep(0.2)  # noqa: ASYNC251
        async for message in super()._answer(prompt):
            yield message


async def test_a_generator_that_lags_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench_scheduled_server.GrpcServer", _Blocking)
    schedule = Schedule(num_tokens=2)
    samples, *_ = await drive("grpc", "completions", [request(index) for index in range(4)], TraceArrivals((0.0, 0.05, 0.06, 0.07)), schedule)
    assert max(sample.lag_s for sample in samples) > 0.08


@contextmanager
def silent(text: str, total: int) -> Iterator[object]:
    shown: list[int] = []
    yield shown.append
    assert shown[-1] == total, text


async def test_two_targets_in_turns_make_two_files_that_can_be_compared(tmp_path: Path) -> None:
    plan = Plan(
        WorkloadOptions("fixed", 1, prompt_words=10, answer_tokens=3), ArrivalOptions("closed", num_clients=2), 3, num_warm_up=1, num_repeats=4
    )
    fast, slow = Schedule(0.01, 0.01, num_tokens=3), Schedule(0.08, 0.01, num_tokens=3)
    async with AsyncExitStack() as stack:
        contestants = []
        for name, schedule in (("fast", fast), ("slow", slow)):
            target = open_target(await stack.enter_async_context(grpc_server(schedule)), "completions", Asking("model"))
            stack.push_async_callback(target.aclose)
            contestants.append(Contestant(name, "model", target))
        paths = await measure(plan, contestants, tmp_path / "new", silent)
        with pytest.raises(SettingError, match="each with a name of its own"):
            await measure(plan, [contestants[0]] * 2, tmp_path, silent)
        with pytest.raises(SettingError, match=r"one without a slow\.jsonl"):
            await measure(plan, contestants[1:], tmp_path / "new", silent)
    ours, theirs = map(load_run, paths)
    assert [path.name for path in paths] == ["fast.jsonl", "slow.jsonl"]
    assert [len(samples) for samples in ours.repeats] == [3, 3, 3, 3]
    assert len(fast.log) == len(slow.log) == 4 * 3 + 1
    assert sorted(fast.prompts) == sorted(slow.prompts)
    assert len(set(fast.prompts)) == 4 * 3 + 1, "no cache may answer a repeat for an earlier one"
    found = compare_runs(ours, theirs)
    assert found.flags == ()
    rows = {(row.metric, row.pairs_of): row.found for row in found.rows}
    assert rows["TTFT ms", "requests"].num_pairs == 12
    assert rows["TTFT ms", "requests"].ratio < 0.6
    assert rows["TTFT p50 ms", "repeats"].num_pairs == 4
    assert rows["TTFT p50 ms", "repeats"].ratio < 0.6
    summed = summarise(ours)
    assert (summed.num_requests, summed.num_failed, summed.tokens.reported) == (12, 0, 36)
    assert summed.server["kv_bytes"].p50 == 4096
    assert summed.spread["TTFT p50 ms"].num == 4
