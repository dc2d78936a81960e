"""What the gateway counts of requests, rooms, tokens and servers, as a scrape says it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, greedy
from gateway_worker import STOP, silence
from prometheus_client.parser import text_string_to_metric_families

from baton.gateway.room import State
from baton.servicekit import MetricsSettings
from baton.wire.v1 import worker_pb2

StackOf = Callable[..., Any]

ON = MetricsSettings(exporter=("prometheus",), port=0)


class Scraped:
    """One scrape: `of(name, label=value, ...)` is the sum of the samples that say so."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def of(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self._samples if sample.name == name and sample.labels.items() >= labels.items())

    def failures(self) -> dict[str, float]:
        return {name: self.of(f"baton_{name}_failed_total") for name in ("bootstrap", "transfer", "rooms")}


async def scrape(stack: Stack) -> Scraped:
    def read() -> str:
        with urllib.request.urlopen(f"http://{stack.addresses['metrics']}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    return Scraped(await asyncio.to_thread(read))


async def test_a_request_is_counted_once_and_its_tokens_one_by_one(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(metrics=ON)
    reply = await stack.reply(ask(sampling=greedy(max_tokens=6)))
    await stack.settled()
    found = await scrape(stack)
    tokens = reply.last.usage.completion_tokens
    assert tokens > 1
    assert found.of("baton_requests_ended_total", outcome="success") == found.of("baton_rooms_succeeded_total") == 1
    assert found.of("baton_tokens_completion_total") == tokens
    assert found.of("baton_tokens_prompt_total") == reply.last.usage.prompt_tokens
    assert found.of("baton_request_inter_token_latency_seconds_count") == tokens - 1
    assert found.of("baton_request_time_to_first_token_seconds_count") == found.of("baton_request_duration_seconds_count") == 1
    stages = {stage: found.of("baton_request_stage_duration_seconds_count", stage=stage) for stage in ("queued", "bootstrapping", "success")}
    assert stages == {"queued": 1, "bootstrapping": 1, "success": 1}
    assert found.failures() == {"bootstrap": 0, "transfer": 0, "rooms": 0}


@pytest.mark.parametrize(
    ("sampling", "reason"), [({"max_tokens": 2}, "length"), ({"stop": ["answer"]}, "stop_string"), ({"stop_token_ids": True}, "stop_token")]
)
async def test_a_complete_answer_is_counted_by_what_ended_it(stack_of: StackOf, sampling: dict[str, Any], reason: str) -> None:
    stack: Stack = await stack_of(metrics=ON)
    if "stop_token_ids" in sampling:
        sampling = {"stop_token_ids": [(await stack.reply()).ids[-1]]}
        reply = await stack.reply(ask(sampling=greedy(**sampling)))
        assert reply.last.finish_reason == STOP
    else:
        await stack.reply(ask(sampling=greedy(**sampling)))
    await stack.settled()
    found = await scrape(stack)
    assert found.of("baton_answers_finished_total", reason=reason) >= 1
    assert found.of("baton_answers_finished_total") == found.of("baton_requests_ended_total", outcome="success")
    assert found.of("baton_clients_left_total") == 0


async def test_clients_that_leave_are_counted_by_where_their_requests_were(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(metrics=ON, max_rooms=1, max_queue=4)
    stack.script(silence, silence)
    first = stack.call()
    await first.read()
    start = await stack.prefill.next_start()
    stack.prefill.event(start.room, bootstrapped=worker_pb2.Bootstrapped())
    await eventually(lambda: stack.gateway.rooms._rooms[start.room].machine.state is State.WAITING)
    queued = stack.call()
    await eventually(lambda: stack.gateway.gate.num_waiting == 1)
    queued.cancel()
    await eventually(lambda: stack.gateway.gate.num_waiting == 0)
    first.cancel()
    await stack.settled()
    found = await scrape(stack)
    assert found.of("baton_clients_left_total", stage="queued", cause="client_gone") == 1
    assert found.of("baton_clients_left_total", stage="waiting", cause="client_gone") == 1
    assert found.of("baton_clients_left_total") == 2
    assert found.of("baton_requests_ended_total", outcome="left") == 1
    assert found.of("baton_answers_finished_total") == 0


async def test_refusals_of_both_fronts(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(metrics=ON)
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.reply(ask(model="another"))
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        await client.post("/v1/completions", json={"model": "another", "prompt": "x"})
        await client.post("/v1/completions", content=b"{")
    found = await scrape(stack)
    assert found.of("baton_requests_refused_total", cause="model_not_found") == 2
    assert found.of("baton_requests_refused_total") == 3
    assert found.of("baton_requests_refused_total", cause="other") == 0
    assert found.of("baton_requests_ended_total") == 0


async def _failing(worker: Any, start: Any) -> None:
    worker.fail(start.room, grpc.StatusCode.UNAVAILABLE, "engine_failed")


async def test_a_room_that_fails_is_counted_by_who_and_why(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(metrics=ON)
    stack.script(None, _failing)
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.reply()
    await stack.settled()
    found = await scrape(stack)
    moved = found.of("baton_bootstrap_failed_total", origin="decode", cause="engine_failed", peer="decode")
    moved += found.of("baton_transfer_failed_total", origin="decode", cause="engine_failed", peer="decode")
    assert moved == 1
    assert found.of("baton_rooms_failed_total") == found.of("baton_rooms_failed_total", origin="decode", cause="engine_failed") == 1
    assert found.of("baton_requests_ended_total", outcome="failed") == 1
    assert found.of("baton_request_stage_duration_seconds_count") == 0


async def test_servers_and_routes_are_looked_up(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(metrics=ON, prefill=2, decode=1)
    await eventually(lambda: len(stack.gateway.fleet.routes) == 2)
    found = await scrape(stack)
    assert found.of("baton_routes") == 2
    assert {state: found.of("baton_servers", server="prefill", state=state) for state in ("known", "connected", "usable", "avoided")} == {
        "known": 2,
        "connected": 2,
        "usable": 2,
        "avoided": 0,
    }
    await stack.decode.kill()
    await eventually(lambda: not stack.gateway.fleet.routes)
    found = await scrape(stack)
    assert (found.of("baton_routes"), found.of("baton_servers", server="decode", state="usable")) == (0, 0)
    assert MODEL
