"""Two prefill and two decode servers, one of which dies or freezes before a request's first token: the client never learns of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from fleet import MODEL, Fleet, Worker, wait_for

from baton.wire.v1 import common_pb2
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.integration

NUM_TOKENS = 12
NUM_ROUTES = 4
#: Silence is noticed after 3 s; the rest is a second computation on a busy machine. gRPC alone would take 15 s, and then fail the request.
FROZEN_ANSWERED_S = 12.0


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Small chunks: a prompt of 750 tokens is a dozen steps, among which a fault finds its place."""
    fleet = Fleet(model_path, tmp_path_factory.mktemp("retry"))
    for _ in range(2):
        fleet.prefill("--max-batched-tokens", "64")
        fleet.decode("--digest", "all")
    fleet.start()
    wait_for(lambda: num_routes(fleet) == NUM_ROUTES, 60, "every pair usable")
    yield fleet
    fleet.close()


def num_routes(fleet: Fleet) -> int:
    return int(httpx.get(f"http://{fleet.http}/ready", timeout=5).json()["routes"])


def ask(fleet: Fleet, prompt: list[int], *, temperature: float = 0.0, timeout: float = 120.0) -> tuple[list[int], pb.RoomReport]:
    """The whole answer, and how it came about."""
    sampling = pb.SamplingParams(temperature=temperature, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=prompt), sampling=sampling, report=True)
    with grpc.insecure_channel(fleet.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        messages = list(InferenceStub(channel).Generate(request, timeout=timeout))
    return [token for message in messages for token in message.token_ids], messages[-1].report


def serving(fleet: Fleet, kind: str) -> Worker | None:
    """The server of that kind that has a room."""
    return next((worker for worker in fleet.workers if worker.spec.name.startswith(kind) and worker.info().load.rooms), None)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_server_killed_before_the_first_token_is_not_noticed(fleet: Fleet, victim: str, temperature: float) -> None:
    """The prompt is new, so that no prefix cache makes its prefill short; the undisturbed run comes after the disturbed one."""
    prompt = [100 + (i * (7 if victim == "prefill" else 11) + round(temperature) * 131) % 4000 for i in range(750)]
    answers: list[tuple[list[int], pb.RoomReport]] = []
    client = threading.Thread(target=lambda: answers.append(ask(fleet, prompt, temperature=temperature)))
    client.start()
    wait_for(lambda: serving(fleet, "prefill") is not None and serving(fleet, "decode") is not None, 20, "a room on both servers")
    prefill, killed = serving(fleet, "prefill"), serving(fleet, victim)
    assert prefill is not None
    assert killed is not None
    instance = killed.info().instance_id
    steps = prefill.info().load.steps
    wait_for(lambda: prefill.info().load.steps > steps, 20, "a chunk computed")
    killed.kill()
    client.join(120)
    assert answers, "the client was told"
    killed.start().wait_ready()
    wait_for(lambda: num_routes(fleet) == NUM_ROUTES, 30, "the killed server in use again")
    tokens, report = answers[0]
    assert len(report.failed_attempts) == 1, report
    failed = report.failed_attempts[0]
    assert instance in (failed.prefill_instance, failed.decode_instance)
    assert instance not in (report.prefill_instance, report.decode_instance)
    assert failed.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert failed.failure.origin == (common_pb2.ORIGIN_PREFILL if victim == "prefill" else common_pb2.ORIGIN_DECODE)
    assert failed.room != report.room
    undisturbed, again = ask(fleet, prompt, temperature=temperature)
    assert not again.failed_attempts
    assert tokens == undisturbed
    fleet.assert_free(10)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_frozen_server_is_routed_around(fleet: Fleet, victim: str) -> None:
    """No socket is closed. Requests that come just then are moved, and those that come later are not sent there at all."""
    frozen = fleet.by_kind(victim)
    instance = frozen.info().instance_id
    prompts = [[100 + (number * 37 + i * 7) % 4000 for i in range(5 + number * 11)] for number in range(4)]
    undisturbed = [ask(fleet, prompt)[0] for prompt in prompts]
    frozen.running.send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(lambda prompt: ask(fleet, prompt), prompts))
        took_s = time.monotonic() - began
        assert [tokens for tokens, _ in answers] == undisturbed
        assert took_s < FROZEN_ANSWERED_S
        moved = [report for _, report in answers if report.failed_attempts]
        assert moved, "no request met the frozen server"
        assert all(report.failed_attempts[0].failure.cause == f"{victim}_silent" for report in moved), moved
        for prompt, expected in zip(prompts, undisturbed, strict=True):
            tokens, report = ask(fleet, prompt)
            assert tokens == expected
            assert not report.failed_attempts
            assert instance not in (report.prefill_instance, report.decode_instance)
    finally:
        frozen.running.send(signal.SIGCONT)
    wait_for(lambda: num_routes(fleet) == NUM_ROUTES, 30, "every pair usable again")
    fleet.assert_free(20)
    wait_for(lambda: instance in used(ask(fleet, prompts[0])[1]), 30, "what thawed is used again")
    fleet.assert_free()


def used(report: pb.RoomReport) -> tuple[str, str]:
    return report.prefill_instance, report.decode_instance
