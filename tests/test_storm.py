"""Two prefill and two decode servers under clients that come all at once, leave at any moment, or read nothing; and one server that is frozen."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from fleet import MODEL, Fleet, wait_for

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.integration

NUM_PROMPTS = 8
NUM_TOKENS = 8
#: gRPC's keepalive finds a frozen process within 15 s; the rest is a busy machine's.
FROZEN_TOLD_S = 25.0


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(model_path, tmp_path_factory.mktemp("storm"))
    for _ in range(2):
        fleet.prefill("--max-batched-tokens", "256")
        fleet.decode("--digest", "all")
    yield fleet.start()
    fleet.close()


def prompt_of(number: int) -> list[int]:
    number %= NUM_PROMPTS
    return [100 + (number * 37 + i * 7) % 4000 for i in range(5 + number * 23)]


def start(fleet: Fleet, prompt: list[int], max_tokens: int, timeout: float = 120.0) -> tuple[grpc.Channel, grpc.Call]:
    """On a connection of its own: gRPC would share one."""
    channel = grpc.insecure_channel(fleet.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return channel, InferenceStub(channel).Generate(
        pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=prompt), sampling=sampling), timeout=timeout
    )


def ask(fleet: Fleet, number: int) -> list[int]:
    channel, call = start(fleet, prompt_of(number), NUM_TOKENS)
    with channel:
        return [token for message in call for token in message.token_ids]


def leave(fleet: Fleet, number: int, after_s: float) -> None:
    channel, call = start(fleet, prompt_of(number), 400)
    with channel:
        time.sleep(after_s)
        call.cancel()


def descriptors(fleet: Fleet) -> dict[str, int]:
    assert fleet.gateway is not None
    return {worker.spec.name: psutil.Process(worker.running.pid).num_fds() for worker in (*fleet.workers, fleet.gateway)}


def test_a_storm_is_answered_rightly_and_leaves_nothing(fleet: Fleet) -> None:
    alone = [ask(fleet, number) for number in range(NUM_PROMPTS)]
    before = descriptors(fleet)
    steps = [worker.info().load.steps for worker in fleet.workers]
    dice = random.Random(5)
    deaf = [start(fleet, prompt_of(number), 1500) for number in range(4)]  # their messages are never read
    with ThreadPoolExecutor(64) as clients:
        answers = [clients.submit(ask, fleet, number) for number in range(48)]
        leavers = [clients.submit(leave, fleet, number, dice.uniform(0, 3)) for number in range(24)]
        for number, answer in enumerate(answers):
            assert answer.result() == alone[number % NUM_PROMPTS], f"request {number}"
        for leaver in leavers:
            leaver.result()
    for channel, call in deaf:
        call.cancel()
        channel.close()
    fleet.assert_free()
    assert all(worker.info().load.steps > had for worker, had in zip(fleet.workers, steps, strict=True)), "a server was never chosen"
    # Each connection of a client is one descriptor of the gateway; they close a moment after the client did.
    wait_for(lambda: all(now <= before[name] + 2 for name, now in descriptors(fleet).items()), 10, lambda: f"{before} -> {descriptors(fleet)}")


def num_routes(fleet: Fleet) -> int:
    return int(httpx.get(f"http://{fleet.http}/ready", timeout=5).json()["routes"])


def test_frozen_servers_end_their_own_rooms_only(fleet: Fleet) -> None:
    """One prefill and one decode server stop in mid-request, as a process does in a debugger or on a dying machine: no socket is closed.

    Requests that are past decode's first token there are told; all others are moved to the other pair and answered.
    """
    frozen = [fleet.by_kind("prefill"), fleet.by_kind("decode")]
    names = {worker.info().instance_id for worker in frozen}
    told: list[str] = []

    def long_request() -> None:
        channel, call = start(fleet, [100 + i % 4000 for i in range(750)], 64)
        with channel:
            try:
                told.append(f"answered with {sum(len(message.token_ids) for message in call)} tokens")
            except grpc.RpcError as error:
                told.append(f"{error.code().name} {error.details()}")

    def lost() -> list[str]:
        return [text for text in told if any(name in text for name in names)]

    clients = [threading.Thread(target=long_request) for _ in range(4)]
    for client in clients:
        client.start()
    wait_for(lambda: all(worker.info().load.rooms > 0 for worker in frozen), 20, "a room on each server that will freeze")
    try:
        for worker in frozen:
            worker.running.send(signal.SIGSTOP)
        wait_for(lambda: num_routes(fleet) == 1, FROZEN_TOLD_S, "one pair is left")
        assert ask(fleet, 1), "the other pair answers"
    finally:
        for worker in frozen:
            worker.running.send(signal.SIGCONT)
    for client in clients:
        client.join(120)
    assert all(text.startswith("UNAVAILABLE") for text in lost()), told
    assert len(lost()) + sum(text == "answered with 64 tokens" for text in told) == len(clients), told
    fleet.assert_free(10)
    # what thawed is used again
    steps = [worker.info().load.steps for worker in frozen]
    wait_for(
        lambda: bool(ask(fleet, 2)) and all(worker.info().load.steps > had for worker, had in zip(frozen, steps, strict=True)),
        30,
        "all servers in use",
    )
    fleet.assert_free()
