"""Decode's pool runs full in mid-stream, with prompts that came from prefill and one that it computed itself: the youngest waits, nobody sees it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from fleet import MODEL, PAGE_SIZE, Fleet, wait_for

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.integration, pytest.mark.long]

#: Two answers fit to their end, four do not; all of them fit when they are let in (64 tokens of growth are kept for each).
NUM_CLIENTS = 4
NUM_TOKENS = 160
NUM_PAGES = 30


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(model_path, tmp_path_factory.mktemp("retraction"))
    try:
        fleet.prefill("--transport", "shm")
        fleet.decode("--transport", "shm", "--digest", "all", "--num-pages", str(NUM_PAGES), "--mixed-prompt-tokens", "32")
        yield fleet.start("--local-prefill-max-tokens", "16")
    finally:
        fleet.close()


def ask(fleet: Fleet, number: int) -> tuple[list[int], pb.RoomReport]:
    """The last client's prompt is short enough for decode to compute."""
    prompt = [100 + (number * 37 + i * 7) % 4000 for i in range(12 if number == NUM_CLIENTS - 1 else 24)]
    sampling = pb.SamplingParams(
        temperature=float(number % 2), seed=number, max_tokens=NUM_TOKENS, ignore_eos=True, frequency_penalty=0.5 * (number % 3)
    )
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=prompt), sampling=sampling, report=True)
    with grpc.insecure_channel(fleet.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        messages = list(InferenceStub(channel).Generate(request, timeout=240))
    return [token for message in messages for token in message.token_ids], messages[-1].report


def test_the_youngest_gives_way_and_no_client_sees_it(fleet: Fleet) -> None:
    assert NUM_CLIENTS * (24 + NUM_TOKENS) > NUM_PAGES * PAGE_SIZE, "nobody has to give way"
    decode = fleet.by_kind("decode")
    alone = [ask(fleet, number) for number in range(NUM_CLIENTS)]
    assert [report.prefilled_on_decode for _, report in alone] == [False] * (NUM_CLIENTS - 1) + [True]
    assert decode.info().load.retractions == 0
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        together = list(clients.map(lambda number: ask(fleet, number), range(NUM_CLIENTS)))
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    assert all(len(tokens) == NUM_TOKENS for tokens, _ in together)
    assert not any(report.failed_attempts for _, report in together), "a retraction is decode's own business"
    fleet.assert_free(10)
    wait_for(lambda: decode.info().load.retractions > 0, 5, lambda: f"a retraction counted: {decode.info().load}")
    load = decode.info().load
    assert load.recomputed_tokens > 0
    assert load.pending_prompt_tokens == 0
