"""A chat of five turns behind a long system prompt, with the real model: the later turns compute and move what is new, and the servers count it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fleet import MODEL, PAGE_SIZE, Fleet, wait_for
from prometheus import counted

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.integration

ON = ("--metrics-exporter", "prometheus", "--metrics-port", "0", "--prefix-cache")
#: A token of SmolLM2-135M: 30 layers, keys and values, 3 heads of 64 numbers of 4 bytes.
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
SYSTEM = "You are the night clerk of a small hotel by the sea, and you answer in one short sentence. " * 100
QUESTIONS = ["Who are you?", "Is there a room left?", "And breakfast?", "How far is the beach?", "Good night!"]


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(model_path, tmp_path_factory.mktemp("prefix-cache"))
    fleet.prefill("--transport", "shm", *ON)
    fleet.decode("--transport", "shm", "--digest", "all", *ON)
    try:
        yield fleet.start()
        fleet.assert_free()
    finally:
        fleet.close()


def say(fleet: Fleet, messages: list[pb.ChatMessage]) -> tuple[str, pb.RoomReport]:
    sampling = pb.SamplingParams(temperature=0, max_tokens=8)
    request = pb.ChatRequest(model=MODEL, messages=messages, sampling=sampling, report=True)
    with grpc.insecure_channel(fleet.grpc) as channel:
        answer = list(InferenceStub(channel).Chat(request, timeout=120))
    return "".join(message.text for message in answer), answer[-1].report


def test_later_turns_compute_and_move_only_what_is_new(fleet: Fleet) -> None:
    prefill, decode = fleet.by_kind("prefill"), fleet.by_kind("decode")
    messages = [pb.ChatMessage(role="system", content=SYSTEM)]
    before = 0
    for question in QUESTIONS:
        messages.append(pb.ChatMessage(role="user", content=question))
        so_far = counted(prefill, "baton_tokens_computed_total")
        answer, report = say(fleet, messages)
        fleet.assert_free()
        new = report.usage.prompt_tokens - before
        # The counter follows the engine's steps.
        least = 1 if before else new
        wait_for(lambda: counted(prefill, "baton_tokens_computed_total") - so_far >= least, 10, f"{least} tokens computed")  # noqa: B023
        computed = counted(prefill, "baton_tokens_computed_total") - so_far
        assert report.transfer.digest_checked
        assert computed == report.usage.prompt_tokens - report.usage.cached_tokens
        if not before:
            assert new > 2000
            assert (computed, report.transfer.bytes) == (new, -(-new // PAGE_SIZE) * PAGE_SIZE * TOKEN_BYTES)
        else:
            # Whole pages are found: the last one of what was there before may have to be computed, and moved, with the new tokens.
            assert new < 100
            assert computed < new + PAGE_SIZE
            assert report.transfer.bytes < (new + 2 * PAGE_SIZE) * TOKEN_BYTES
        before = report.usage.prompt_tokens
        messages.append(pb.ChatMessage(role="assistant", content=answer))
    for worker in (prefill, decode):
        found = counted(worker, "baton_prefix_tokens_total", outcome="found")
        assert found > 4 * 2000
        assert counted(worker, "baton_prefix_pages") > 2000 // PAGE_SIZE
