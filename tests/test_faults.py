"""kill -9 of either server and a client that leaves, in mid-transfer and in mid-stream: who is told what, and when the pages are back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from fleet import MODEL, Fleet, wait_for

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.integration

#: Seconds of prefill on a small machine, so that the transfer, layer by layer beside it, is still going on when a fault comes.
LONG_PROMPT = [100 + i % 4000 for i in range(4000)]
TELL_S = 5.0
PAGES_BACK_S = 2.0


@pytest.fixture(scope="module", params=["shm", "tcp"])
def fleet(request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of its own, with small chunks: a transfer then spans many of them."""
    fleet = Fleet(model_path, tmp_path_factory.mktemp("faults"))
    fleet.prefill("--transport", request.param, "--max-batched-tokens", "64")
    fleet.decode("--transport", request.param, "--digest", "all")
    yield fleet.start()
    fleet.close()


class Call:
    """One streaming request on a thread of its own."""

    def __init__(self, fleet: Fleet, prompt: list[int], max_tokens: int) -> None:
        self.channel = grpc.insecure_channel(fleet.grpc)
        sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        self.stream = InferenceStub(self.channel).Generate(request, timeout=120)
        self.tokens: list[int] = []
        self.error: grpc.RpcError | None = None
        self.ended_at = 0.0
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            for message in self.stream:
                self.tokens += message.token_ids
        except grpc.RpcError as error:
            self.error = error
        self.ended_at = time.monotonic()

    def leave(self) -> None:
        self.stream.cancel()

    def join(self, timeout_s: float) -> None:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), f"the client hangs after {timeout_s} s"
        self.channel.close()


def in_transfer(fleet: Fleet) -> Call:
    """A request whose pages are being written."""
    call = Call(fleet, LONG_PROMPT, 64)
    decode, prefill = fleet.by_kind("decode"), fleet.by_kind("prefill")
    wait_for(lambda: decode.info().load.published_pages > 0, 10, "pages published")
    steps = prefill.info().load.steps
    wait_for(lambda: prefill.info().load.steps > steps + 1, 20, "a chunk computed")
    assert not call.tokens, "the prompt was over before the fault"
    return call


def in_stream(fleet: Fleet) -> Call:
    """A request that is being answered."""
    call = Call(fleet, [1, 2, 3, 4, 5], 4000)
    wait_for(lambda: len(call.tokens) >= 4, 30, "four tokens")
    return call


def assert_answers(fleet: Fleet) -> None:
    call = Call(fleet, [1, 2, 3, 4, 5, 6, 7, 8], 8)
    call.join(60)
    assert call.error is None, call.error
    assert len(call.tokens) == 8
    fleet.assert_free()


def assert_told(call: Call, killed_at: float, origins: set[str], stage: str) -> None:
    call.join(TELL_S + 1)
    assert call.ended_at - killed_at < TELL_S
    assert call.error is not None
    assert call.error.code() is grpc.StatusCode.UNAVAILABLE, call.error
    text = call.error.details().lower()
    assert any(origin in text for origin in origins), text
    assert stage in text, text


@pytest.mark.parametrize("phase", [in_transfer, in_stream])
def test_client_leaves(fleet: Fleet, phase: Callable[[Fleet], Call]) -> None:
    call = phase(fleet)
    call.leave()
    call.join(5)
    fleet.assert_free(PAGES_BACK_S)
    assert_answers(fleet)


def test_http_client_leaves(fleet: Fleet) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"http://{fleet.http}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
    fleet.assert_free(PAGES_BACK_S)
    assert_answers(fleet)


def test_prefill_killed_in_transfer(fleet: Fleet) -> None:
    call = in_transfer(fleet)
    prefill = fleet.by_kind("prefill")
    prefill.kill()
    killed_at = time.monotonic()
    assert_told(call, killed_at, {"prefill"}, "transferring")
    decode = fleet.by_kind("decode").info().load
    wait_for(lambda: (load := fleet.by_kind("decode").info().load).free_pages == load.total_pages, 5, f"decode's pages back: {decode}")
    prefill.start().wait_ready()
    wait_for(fleet.ready, 20, "the pair usable again")
    assert_answers(fleet)


@pytest.mark.parametrize("phase", [in_transfer, in_stream])
def test_decode_killed(fleet: Fleet, phase: Callable[[Fleet], Call]) -> None:
    call = phase(fleet)
    decode = fleet.by_kind("decode")
    decode.kill()
    killed_at = time.monotonic()
    assert_told(call, killed_at, {"decode"}, "transferring" if phase is in_transfer else "success")
    wait_for(lambda: (load := fleet.by_kind("prefill").info().load).free_pages == load.total_pages, 5, "prefill's pages back")
    decode.start().wait_ready()
    wait_for(fleet.ready, 20, "the pair usable again")
    assert_answers(fleet)


def test_gateway_killed(fleet: Fleet) -> None:
    """Its rooms end on both servers, and a new gateway is served at once."""
    call = in_transfer(fleet)
    assert fleet.gateway is not None
    fleet.gateway.kill()
    call.join(5)
    fleet.assert_free(PAGES_BACK_S)
    fleet.gateway.start().wait_ready()
    wait_for(fleet.ready, 20, "the pair usable again")
    assert_answers(fleet)
