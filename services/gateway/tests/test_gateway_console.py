"""The console's memory and its feed: bounded, never behind, and silent about what is nobody's business."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from contextlib import aclosing

import grpc
import grpc.aio
import httpx
import pytest
from gateway_feed import Page
from gateway_harness import Stack, ask, eventually, failure_of
from gateway_worker import silence
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.console import feed as feed_module
from baton.gateway.console.feed import MAX_FRAMES, MAX_READERS
from baton.gateway.console.history import MAX_CAUSES, NUM_FAILED_KEPT, NUM_KEPT, OTHER, Ended, History
from baton.gateway.console.rows import dump
from baton.gateway.console.seconds import GROWTH, NUM_SECONDS, Seconds, Window, percentile
from baton.gateway.console.siblings import Siblings, told_window
from baton.gateway.console.view import changes
from baton.gateway.report import Passage
from baton.gateway.room import Room
from baton.servicekit import KeyRole, new_key
from baton.wire.v1 import common_pb2, console_pb2, console_pb2_grpc

CLIENT, CLIENT_RECORD = new_key(KeyRole.CLIENT)
ADMIN, ADMIN_RECORD = new_key(KeyRole.ADMIN)

# --- what is kept -----------------------------------------------------------------------------------------------------------------


def one(at: float = 0.0, cause: str = "", ttft_ms: float = 10.0) -> Ended:
    passage = Passage(at - 1, first_token_at=at - 1 + ttft_ms / 1e3, last_token_at=at, num_tokens=3)
    failure = common_pb2.Failure(cause=cause, origin=common_pb2.ORIGIN_DECODE) if cause else None
    return Ended("req", 1, Room.plain(at - 1), passage, at, 5, 3, None, failure)


@given(st.lists(st.floats(0.2, 500_000), min_size=1, max_size=200))
def test_percentiles_are_right_within_half_a_bucket(values: list[float]) -> None:
    seconds = Seconds()
    for value in values:
        seconds.add(7, failed=False, num_tokens=1, ttft_ms=value, itl_ms=0)
    window = seconds.window(5, 5)
    exact = sorted(values)[math.ceil(0.99 * len(values)) - 1]
    found = percentile(window.ttft, 0.99)
    assert found is not None
    assert exact / math.sqrt(GROWTH) * 0.999 <= found <= exact * math.sqrt(GROWTH) * 1.001
    assert (window.num, window.num_tokens, percentile(window.itl, 0.5)) == (len(values), len(values), None)


def test_seconds_forget_what_is_older_than_the_ring() -> None:
    seconds = Seconds()
    seconds.add(3, failed=True, num_tokens=4, ttft_ms=1, itl_ms=1)
    assert seconds.window(0, 5).num_failed == 1
    seconds.add(3 + NUM_SECONDS, failed=False, num_tokens=4, ttft_ms=1, itl_ms=1)
    assert seconds.window(0, 5).num == 0
    assert seconds.window(NUM_SECONDS, 5).num == 1


def test_failures_outlive_a_flood_of_successes_and_everything_is_bounded() -> None:
    history = History()
    history.add(one(cause="early"))
    for _ in range(2 * NUM_KEPT):
        history.add(one())
    kept = history.after(0)
    assert [ended.number for ended in kept] == [1, *range(NUM_KEPT + 2, 2 * NUM_KEPT + 2)]
    assert history.after(2 * NUM_KEPT) == kept[-1:]
    for number in range(NUM_FAILED_KEPT + MAX_CAUSES):
        history.add(one(cause=f"cause-{number}"))
    assert sum(ended.failure is not None for ended in history.after(0)) == NUM_FAILED_KEPT
    assert len(history.causes) == MAX_CAUSES + 1
    assert history.causes[OTHER] == NUM_FAILED_KEPT + 1
    assert history.num_ended == 1 + 2 * NUM_KEPT + NUM_FAILED_KEPT + MAX_CAUSES


def test_a_process_that_is_started_anew_is_heard_from_its_beginning_and_one_that_is_away_has_nothing_open() -> None:
    siblings = Siblings((1, 2))
    row = {"n": 1, "at": 5, "name": "a"}
    counts = {"states": {"WAITING": 2}, "open": 2, "queued": 1, "max_rooms": 9, "ended": 4, "failed": 1, "refused": 0, "retried": 0}
    window = Window(3, 1, 30, Counter({4: 3}), Counter({2: 1}))
    told = {"started": 7, "ended": [row], "counts": counts, "live": {"b": {}}, "rooms": {"place": 2}, "causes": [["client", "WAITING", "gone", 1]]}
    siblings.take(1, json.loads(dump(told | {"windows": {"3": told_window(window)}})))
    assert siblings.question(1) == {"started": 7, "after": 4}
    (part,) = siblings.parts
    assert part.window(3) == window
    assert part.window(3) + window == Window(6, 2, 60, Counter({4: 6}), Counter({2: 2}))
    assert part.window(4) == Window()
    assert siblings.num_rooms("place") == 2
    siblings.lost(1)
    assert (siblings.away, siblings.num_rooms("place"), siblings.parts[0].counts["open"], siblings.parts[0].counts["ended"]) == ([1], 0, 0, 4)
    siblings.take(1, told | {"started": 8, "counts": counts | {"ended": 1}, "windows": {}})
    assert siblings.away == []
    assert siblings.parts[0].window(3) == Window()
    numbers = [one.row["n"] for one in siblings.after(0)]
    assert len(set(numbers)) == 2
    assert [one.row["n"] for one in siblings.after(1)] == numbers[1:]


rows = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3))


@given(rows, rows, st.integers(), st.integers())
def test_changes_make_the_one_view_into_the_other(before: dict[str, int], after: dict[str, int], x: int, y: int) -> None:
    found = changes({"live": before, "counts": x}, {"live": after, "counts": y})
    live = {key: row for key, row in before.items() if key not in found.get("live", {}).get("gone", ())} | found.get("live", {}).get("set", {})
    assert live == after
    assert found.get("counts", x) == y
    assert changes({"live": after}, {"live": dict(after)}) == {}


# --- the feed over HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def watched(split: Stack):
    page = Page()
    task = asyncio.create_task(page.follow(split.http))
    await eventually(lambda: page.num_snapshots == 1)
    yield split, page
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_finished_request_is_told_with_the_numbers_of_its_report(watched: tuple[Stack, Page]) -> None:
    stack, page = watched
    report = (await stack.reply()).last.report
    await eventually(lambda: 1 in page.ended)
    row = page.ended[1]
    assert row["room"] == str(report.room)
    assert (row["prompt"], row["tokens"]) == (report.usage.prompt_tokens, report.usage.completion_tokens)
    assert (row["ttft"], row["itl"], row["total"]) == pytest.approx((report.ttft_ms, report.mean_itl_ms, report.total_ms), abs=1e-3)
    spans = [(span.start_ms, span.duration_ms) for span in report.states]
    assert [tuple(state[1:]) for state in row["states"]] == [pytest.approx(span, abs=1e-3) for span in spans]
    assert row["transfer"]["puts"] == report.transfer.puts
    assert row["transfer"]["digest"] is True
    assert row["transfer"]["parts"] == [[0, 0, 1, 0.0, 0.5, 23_040], [0, 1, 1, 0.75, 0.625, 23_040]]
    assert row["marks"].keys() >= {"reserved", "bootstrapped", "transfer_started", "transferred", "kv_ready", "finished"}
    assert page.known["counts"]["ended"] == 1
    assert [pair["gb_per_s"] for pair in page.known["pairs"].values()] == [4.0]


async def test_a_room_is_told_while_it_is_open_and_its_failure_when_it_is_not(watched: tuple[Stack, Page]) -> None:
    stack, page = watched
    stack.script(silence, silence)
    call = stack.call()
    await eventually(lambda: [row["state"] for row in page.known["live"].values()] == ["BOOTSTRAPPING"])
    call.cancel()
    await eventually(lambda: 1 in page.ended)
    assert page.ended[1]["failure"]["cause"] == "client_gone"
    await eventually(lambda: page.known["live"] == {} and page.known["causes"] == [["client", "BOOTSTRAPPING", "client_gone", 1]])
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.reply(ask("hello", model="other"))
    await eventually(lambda: ["client", "REFUSED", "model_not_found", 1] in page.known["causes"])


async def test_many_requests_are_few_messages(watched: tuple[Stack, Page]) -> None:
    stack, page = watched
    begun = asyncio.get_running_loop().time()
    for _ in range(10):
        await asyncio.gather(*(stack.reply() for _ in range(20)))
    await eventually(lambda: page.known["counts"]["ended"] == 200)
    ticks = (asyncio.get_running_loop().time() - begun) / feed_module.TICK_S
    assert page.num_deltas <= ticks + 1
    assert len(page.ended) + page.num_skipped == 200


async def test_nothing_that_was_said_is_in_the_feed(watched: tuple[Stack, Page]) -> None:
    stack, page = watched
    await stack.reply(ask("a marked prompt zebra"))
    await eventually(lambda: 1 in page.ended)
    assert "zebra" not in page.text
    assert "forty" not in page.text


async def test_a_reader_that_takes_nothing_costs_a_bounded_amount_and_gets_the_whole_view_again(split: Stack) -> None:
    console = split.gateway.console
    assert console is not None
    async with aclosing(console.feed.read(operator=True)) as frames:
        assert (await anext(frames))[0] == "snapshot"
        (reader,) = console.feed._audiences[True].readers
        most = 0
        while not reader.behind:
            await split.reply()
            most = max(most, len(reader.frames))
            await asyncio.sleep(0.05)
        assert most <= MAX_FRAMES
        assert not reader.frames
        kind, data = await anext(frames)
        assert kind == "snapshot"
        assert json.loads(data)["counts"]["ended"] >= MAX_FRAMES
    assert console.feed.num_readers == 0


async def test_readers_are_bounded(split: Stack) -> None:
    console = split.gateway.console
    assert console is not None
    readers = [console.feed.read(operator=True) for _ in range(MAX_READERS)]
    for reader in readers:
        await anext(reader)
    async with httpx.AsyncClient(base_url=split.http) as client:
        refused = await client.get("/console/feed")
    assert refused.status_code == 429
    assert str(MAX_READERS) in refused.json()["error"]["message"]
    for reader in readers:
        await reader.aclose()
    assert console.feed.num_readers == 0


async def test_a_reader_that_leaves_is_forgotten(split: Stack) -> None:
    console = split.gateway.console
    assert console is not None
    task = asyncio.create_task(Page().follow(split.http))
    await eventually(lambda: console.feed.num_readers == 1)
    task.cancel()
    await eventually(lambda: console.feed.num_readers == 0)


# --- who may ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def guarded(stack_of, tmp_path) -> Stack:
    keys = tmp_path / "keys"
    keys.write_text(f"{CLIENT_RECORD.line()}\n{ADMIN_RECORD.line()}\n")
    stack: Stack = await stack_of(api_key_file=keys)
    stack.key = CLIENT
    return stack


async def test_a_client_is_told_no_address_room_or_request_id_and_an_operator_is(guarded: Stack) -> None:
    pages = {key: Page() for key in (CLIENT, ADMIN)}
    tasks = [asyncio.create_task(page.follow(guarded.http, key)) for key, page in pages.items()]
    await eventually(lambda: all(page.num_snapshots for page in pages.values()))
    report = (await guarded.reply(ask("hello", request_id="somebody-elses"))).last.report
    await guarded.decode.kill()
    await eventually(lambda: all(1 in page.ended and "lost" in page.text for page in pages.values()))
    addresses = [worker.address for worker in guarded.workers]
    assert all(address in pages[ADMIN].text for address in addresses)
    assert "somebody-elses" in pages[ADMIN].text
    assert str(report.room) in pages[ADMIN].text
    for secret in (*addresses, "somebody-elses", str(report.room), CLIENT, ADMIN):
        assert secret not in pages[CLIENT].text
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_without_a_key_there_is_a_page_and_no_feed(guarded: Stack) -> None:
    async with httpx.AsyncClient(base_url=guarded.http) as client:
        page = await client.get("/console", follow_redirects=True)
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "<script>" not in page.text
        assert "style=" not in page.text
        for answer in (await client.get("/console/feed"), await client.get("/console/feed", headers={"authorization": "Bearer wrong"})):
            assert answer.status_code == 401
            assert CLIENT_RECORD.id not in answer.text
        assert (await client.get("/console/..%2fconsole.py")).status_code == 404
        assert (await client.get("/console/secret.py")).status_code == 404
        script = await client.get("/console/console.js")
        assert script.headers["content-type"].startswith("text/javascript")
        assert (await client.get("/console/console.js", headers={"if-none-match": script.headers["etag"]})).status_code == 304


async def test_a_withdrawn_key_ends_its_feed(guarded: Stack, tmp_path) -> None:
    page = Page()
    task = asyncio.create_task(page.follow(guarded.http, CLIENT))
    await eventually(lambda: page.num_snapshots == 1)
    (tmp_path / "new").write_text(f"{ADMIN_RECORD.line()}\n")
    (tmp_path / "new").rename(tmp_path / "keys")
    await asyncio.wait_for(task, 30)


async def test_only_an_operator_drains(guarded: Stack) -> None:
    async with httpx.AsyncClient(base_url=guarded.http) as client:

        async def drain(key: str, body: object) -> httpx.Response:
            return await client.post("/console/drain", headers={"authorization": f"Bearer {key}"} if key else {}, json=body)

        order = {"instance_id": guarded.decode.instance_id}
        assert (await drain("", order)).status_code == 401
        assert (await drain(CLIENT, order)).status_code == 403
        assert (await drain(ADMIN, {"instance_id": "nobody"})).status_code == 404
        assert (await drain(ADMIN, {})).json()["error"]["param"] == "instance_id"
        assert guarded.decode.drains == 0
        assert (await drain(ADMIN, order)).json() == {"instance_id": guarded.decode.instance_id, "rooms": 0}
        await guarded.decode.wait(lambda: guarded.decode.drains == 1)


async def test_without_keys_nobody_drains(split: Stack) -> None:
    async with httpx.AsyncClient(base_url=split.http) as client:
        answer = await client.post("/console/drain", json={"instance_id": split.decode.instance_id})
    assert answer.status_code == 403
    assert "--api-key-file" in answer.json()["error"]["message"]


# --- over gRPC, and not at all ------------------------------------------------------------------------------------------------------


async def test_grpc_has_the_same_feed_under_the_same_keys(guarded: Stack) -> None:
    stub = console_pb2_grpc.ConsoleStub(guarded.channel)
    code, _ = await failure_of(stub.Watch(console_pb2.WatchRequest()))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    call = stub.Watch(console_pb2.WatchRequest(), metadata=(("authorization", f"Bearer {CLIENT}"),))
    first = await call.read()
    assert first.kind == "snapshot"
    assert all("address" not in row for row in json.loads(first.json)["servers"].values())
    call.cancel()
    assert guarded.gateway.console is not None
    await eventually(lambda: guarded.gateway.console.feed.num_readers == 0)  # type: ignore[union-attr]


async def test_switched_off_it_is_not_there_and_nothing_is_recorded(stack_of) -> None:
    stack: Stack = await stack_of(console=False)
    assert (await stack.reply()).text
    assert stack.gateway.console is None
    async with httpx.AsyncClient(base_url=stack.http) as client:
        assert [(await client.get(path)).status_code for path in ("/console", "/console/feed")] == [404, 404]
    code, _ = await failure_of(console_pb2_grpc.ConsoleStub(stack.channel).Watch(console_pb2.WatchRequest()))
    assert code is grpc.StatusCode.UNIMPLEMENTED
