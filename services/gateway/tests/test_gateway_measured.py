"""What servers report that is no number, or none that can be: every page that the gateway makes of it stays JSON, and the log names it once."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from gateway_feed import Page
from gateway_harness import MODEL, Stack, ask, eventually, greedy
from gateway_worker import TRANSFER, ScriptedWorker, by_the_book
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from structlog.testing import capture_logs

from baton.gateway.measured import LARGEST, clean_info, clean_report
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

StackOf = Callable[..., Any]

WRONG = [math.nan, math.inf, -math.inf]
FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def fill(message: Message, value: float) -> None:
    """Sets every float in it, and in what it can hold: of a oneof the last."""
    for field in message.DESCRIPTOR.fields:
        here, many = getattr(message, field.name), field.is_repeated
        if field.type in FLOATS:
            if many:
                here.append(value)
            else:
                setattr(message, field.name, value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            fill(here.add() if many else here, value)


def floats(message: Message) -> Iterator[float]:
    for field, value in message.ListFields():
        for one in value if field.is_repeated else [value]:
            if field.type in FLOATS:
                yield one
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                yield from floats(one)


@pytest.mark.parametrize("value", [*WRONG, -1.0, 1e300])
def test_no_float_that_a_server_can_say_is_left_as_it_cannot_be(value: float) -> None:
    """Whatever fields there will be."""
    info = worker_pb2.WorkerInfo()
    fill(info, value)
    report = worker_pb2.Report()
    fill(report, value)
    for kind in (event := worker_pb2.RoomEvent()).DESCRIPTOR.oneofs_by_name["event"].fields:
        fill(getattr(event, kind.name), value)
        event.at_ms = value
        report.events.append(event)
    if math.isfinite(value):  # as a log probability it may be
        del report.logprobs[:], report.prompt_logprobs[:]
    assert clean_info(info)
    assert {one.field for one in clean_report(report)} >= {"PeerState.gigabytes_per_s", "TransferPart.start_ms", "RoomEvent.at_ms"}
    left = [*floats(info), *floats(report)]
    assert all(0 <= one <= LARGEST for one in left), left
    assert not report.logprobs
    assert not report.prompt_logprobs
    assert not clean_report(report)


def test_a_stall_without_end_stays_a_stall_and_what_can_be_stays_as_it_is() -> None:
    info = worker_pb2.WorkerInfo(load=worker_pb2.WorkerLoad(stalled_s=math.inf, prompt_tokens_per_s=3.5))
    (wrong,) = clean_info(info)
    assert (wrong.field, wrong.value, wrong.limit) == ("WorkerLoad.stalled_s", math.inf, "[0, 1e+12]")
    assert (info.load.stalled_s, info.load.prompt_tokens_per_s) == (LARGEST, 3.5)
    said = inference_pb2.TokenLogprobs(logprob=-1e30, top_logprobs=[-0.0, -3.4e38, -3.4e38])
    report = worker_pb2.Report(logprobs=[worker_pb2.RoomLogprobs(logprobs=said)])
    assert clean_report(report) == []
    assert len(report.logprobs) == 1


def strict(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def transferring(value: float) -> Callable[[ScriptedWorker, worker_pb2.Start], Any]:
    async def script(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        transfer = inference_pb2.TransferReport()
        transfer.CopyFrom(TRANSFER)
        transfer.duration_ms = transfer.exposed_ms = transfer.parts[0].start_ms = value
        worker.event(start.room, bootstrapped=worker_pb2.Bootstrapped())
        worker.event(start.room, transfer_started=worker_pb2.TransferStarted())
        worker.tokens(start.room, 0, worker.shared.tokens(start)[:1])
        worker.event(start.room, transferred=worker_pb2.Transferred(transfer=transfer))

    return script


@pytest.mark.parametrize("value", WRONG)
async def test_pages_stay_json_and_the_log_names_each_field_once(stack_of: StackOf, value: float) -> None:
    with capture_logs() as logs:
        stack: Stack = await stack_of()
        page = Page()
        following = asyncio.create_task(page.follow(stack.http))
        path = worker_pb2.PeerState(
            bootstrap_address=stack.prefill.bootstrap, prefill_instance_id=stack.prefill.instance_id, transport="sysv", gigabytes_per_s=value
        )
        for _ in range(3):
            stack.decode.report(worker_pb2.Report(peers=worker_pb2.PeerStates(peers=[path])))
            for worker in (stack.prefill, stack.decode):
                worker.report_load(prompt_tokens_per_s=value, running=5)
        await eventually(lambda: all(worker.load.running == 5 for worker in stack.gateway.fleet.workers))
        async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
            ready = await client.get("/ready")
        assert strict(ready.text)["paths"][0]["gb_per_s"] == 0
        stack.script(transferring(value))
        assert (await stack.reply()).last.report.transfer.duration_ms == 0
        await eventually(lambda: bool(page.ended) and any(row["running"] == 5 for row in page.known["servers"].values()))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        for line in page.text.splitlines():
            if line.startswith("data: "):
                strict(line.removeprefix("data: "))
    named = [(log["worker"], log["field"]) for log in logs if log["event"] == "worker reports a number that cannot be"]
    assert sorted(named) == [
        ("decode-0", "PeerState.gigabytes_per_s"),
        ("decode-0", "WorkerLoad.prompt_tokens_per_s"),
        ("prefill-0", "TransferPart.start_ms"),
        ("prefill-0", "TransferReport.duration_ms"),
        ("prefill-0", "TransferReport.exposed_ms"),
        ("prefill-0", "WorkerLoad.prompt_tokens_per_s"),
    ]


@pytest.mark.parametrize("value", WRONG)
async def test_a_log_probability_that_is_none_fails_its_request_and_no_other(stack_of: StackOf, value: float) -> None:
    stack: Stack = await stack_of(plain=1)

    async def script(worker: ScriptedWorker, start: worker_pb2.Start) -> None:
        said = inference_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=[100], top_logprobs=[value])
        worker.event(start.room, prefill_started=worker_pb2.PrefillStarted())
        worker.report(
            worker_pb2.Report(rooms=[start.room], indexes=[0], tokens=[100], logprobs=[worker_pb2.RoomLogprobs(room=start.room, logprobs=said)])
        )
        worker.event(start.room, finished=worker_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, completion_tokens=1))

    stack.script(decode=script)
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "logprobs": 1})
    error = strict(answer.text)["error"]
    assert (answer.status_code, error["code"], error["origin"]) == (500, "tokens_lost", "decode")
    stack.script(decode=by_the_book)
    assert (await stack.reply(ask(sampling=greedy()))).text
