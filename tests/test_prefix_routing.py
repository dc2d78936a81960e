"""Two prefill and two decode servers behind a gateway that routes by prefixes: it knows what they hold, because they tell it, and expects no more.

The model is SmolLM2 with two layers and random weights: what is held where does not depend on what is said.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from fleet import MODEL, PAGE_SIZE, Fleet, Worker, wait_for

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.integration

#: A token of two layers: keys and values, 3 heads of 64 numbers of 4 bytes.
TOKEN_BYTES = 2 * 2 * 3 * 64 * 4
NUM_PAGES = 96
ANSWER = 40
#: What servers say of their load is up to a second old, and one that seems to be busy still is left where only a transfer is spared.
LOAD_S = 1.2
#: Every prompt begins with a number of its own.
_FIRST = itertools.count(1000)


@pytest.fixture(scope="module")
def shallow(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shallow")
    for path in model_path.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin"):
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return folder


@pytest.fixture
def fleet(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(shallow, tmp_path_factory.mktemp("prefix-routing"))
    common = ("--transport", "shm", "--load-format", "dummy", "--num-pages", str(NUM_PAGES), "--threads", "1")
    for _ in range(2):
        fleet.prefill(*common)
        fleet.decode("--digest", "all", *common)
    try:
        fleet.start("--routing", "prefix-aware")
        wait_for(lambda: num_routes(fleet) == 4, 60, "four pairs")
        yield fleet
        fleet.assert_free()
    finally:
        fleet.close()


def num_routes(fleet: Fleet) -> int:
    return int(httpx.get(f"http://{fleet.http}/ready", timeout=5).json()["routes"])


class Answered:
    """One request: what came, where, and what the gateway expected there."""

    def __init__(self, fleet: Fleet, prompt: list[int], max_tokens: int = ANSWER) -> None:
        sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=prompt), sampling=sampling, report=True)
        with grpc.insecure_channel(fleet.grpc) as channel:
            messages = list(InferenceStub(channel).Generate(request, timeout=120))
        self.tokens = [token for message in messages for token in message.token_ids]
        self.report = messages[-1].report
        assert not self.report.failed_attempts
        self.pair = (self.report.prefill_instance, self.report.decode_instance)
        self.cached = self.report.usage.cached_tokens
        self.moved = self.report.transfer.bytes // TOKEN_BYTES
        assert fleet.gateway is not None
        lines = map(json.loads, fleet.gateway.running.log_path.read_text().splitlines())
        opened = next(line for line in lines if line.get("event") == "room opened" and line["room"] == self.report.room)
        self.reason, self.expected = opened["routing"], opened["prefix_tokens"]


def new_prompt(num_tokens: int) -> list[int]:
    return [next(_FIRST), *range(100, 99 + num_tokens)]


def whole_pages(num_tokens: int) -> int:
    return num_tokens // PAGE_SIZE * PAGE_SIZE


def others(fleet: Fleet, count: int, num_tokens: int) -> None:
    """Prompts of other conversations: the lightest servers take them, in turns."""
    for _ in range(count):
        assert Answered(fleet, new_prompt(num_tokens), 2).reason == "no_prefix"


def server(fleet: Fleet, instance_id: str) -> Worker:
    return next(worker for worker in fleet.workers if worker.info().instance_id == instance_id)


def test_a_chat_stays_where_its_pages_are_and_moves_on_when_they_are_gone(fleet: Fleet) -> None:
    history = new_prompt(200)
    first = Answered(fleet, history)
    assert (first.reason, first.expected, first.cached) == ("no_prefix", 0, 0)
    for _ in range(4):
        others(fleet, 1, 100)
        before, history = len(history), [*history, *first.tokens, *range(300, 320)]
        turn = Answered(fleet, history)
        assert (turn.pair, turn.reason) == (first.pair, "prefix")
        # Prefill holds the last prompt; decode the answer too, whose last token nothing was computed behind.
        assert turn.expected == turn.cached == whole_pages(before)
        assert turn.moved == -(-(len(history) - whole_pages(before + ANSWER - 1)) // PAGE_SIZE) * PAGE_SIZE
        first.tokens = turn.tokens

    holders = [server(fleet, instance_id) for instance_id in first.pair]
    holders[0].kill()
    wait_for(lambda: num_routes(fleet) == 2, 20, "the killed server's routes gone")
    history = [*history, *first.tokens, 320]
    time.sleep(LOAD_S)
    moved_on = Answered(fleet, history)
    assert moved_on.pair[0] != first.pair[0]
    assert moved_on.pair[1] == first.pair[1]
    assert (moved_on.reason, moved_on.expected, moved_on.cached) == ("prefix_on_decode", 0, 0)
    assert moved_on.moved < 4 * PAGE_SIZE

    holders[0].start().wait_ready()
    wait_for(lambda: num_routes(fleet) == 4, 60, "four pairs again")
    holders[1].kill()
    wait_for(lambda: num_routes(fleet) == 2, 20, "the killed server's routes gone")
    before, history = len(history), [*history, *moved_on.tokens, 321]
    last = Answered(fleet, history)
    assert last.pair[0] == moved_on.pair[0]
    assert last.pair[1] != first.pair[1]
    assert (last.reason, last.expected, last.cached) == ("prefix", whole_pages(before), whole_pages(before))
    assert last.moved >= len(history)
    holders[1].start().wait_ready()


def test_what_was_evicted_is_expected_nowhere(fleet: Fleet) -> None:
    history = new_prompt(400)
    assert Answered(fleet, history).reason == "no_prefix"
    again = Answered(fleet, history)
    assert (again.reason, again.expected, again.cached) == ("prefix", 400, whole_pages(399))
    others(fleet, 8, 1400)  # each pool holds 1,536 tokens
    evicted = Answered(fleet, history)
    assert (evicted.reason, evicted.expected, evicted.cached) == ("no_prefix", 0, 0)
