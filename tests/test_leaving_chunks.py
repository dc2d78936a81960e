"""A request ends while a whole chunk of its prompt is computed, the default 1,024 tokens of it, on a server where that takes many seconds: the
server leaves the pass between two layers and has its pages back, and what it answers afterwards is right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import grpc
import pytest
from faults.cells import Log
from fleet import MODEL, Fleet, Worker, wait_for
from test_faults import PAGES_BACK_S, Call

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.integration

HELD = Path(__file__).parent / "faults" / "held_service.py"
#: One chunk of the default size; of thirty layers.
PROMPT = [100 + 7 * i % 4000 for i in range(1024)]
#: The pass takes a quarter of a minute longer than the model does.
LAYER_S = 0.5
#: A server that stops ends after this what still runs, and waits for less than a pass takes.
DRAIN_S = "0.5"


class SlowLayers(Fleet):
    """Its first worker is the one that computes prompts."""

    @property
    def hold(self) -> Path:
        return self.run_dir / "hold"

    @property
    def prompts(self) -> Worker:
        return self.workers[0]

    def _command(self, service: str, *flags: str) -> tuple[str, ...]:  # type: ignore[override]
        if service == "gateway":
            return super()._command(service, *flags)
        return (sys.executable, str(HELD), service, str(self.hold), *flags)

    def answer(self) -> list[int]:
        self.hold.write_text("")
        call = Call(self, PROMPT, 8)
        call.join(60)
        assert call.error is None, call.error
        return call.tokens


@pytest.fixture(scope="module", params=["split", "plain"])
def fleet(request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowLayers]:
    fleet = SlowLayers(model_path, tmp_path_factory.mktemp("chunks"))
    fleet.hold.write_text("")
    anew = "--no-prefix-cache"  # the same prompt, all of it, each time
    if request.param == "plain":
        fleet.plain("--drain-timeout-s", DRAIN_S, anew)
    else:
        fleet.prefill("--drain-timeout-s", DRAIN_S, anew)
        fleet.decode("--digest", "all", anew)
    yield fleet.start()
    fleet.close()


@pytest.fixture(scope="module")
def expected(fleet: SlowLayers) -> list[int]:
    tokens = fleet.answer()
    fleet.assert_free()
    return tokens


def in_chunk(fleet: SlowLayers) -> Log:
    """Slows the layers; what the server logs from now on, for `wait_begun`."""
    fleet.hold.write_text(f"layers {LAYER_S}")
    return Log(fleet.prompts.running.log_path)


def wait_begun(log: Log, fleet: SlowLayers) -> None:
    """Until layers of the prompt's only chunk are computed: the first of them is on its way already, where it goes anywhere."""
    milestone = "PrefillStarted" if fleet.prompts.spec.name.startswith("plain") else "TransferStarted"
    wait_for(lambda: any(line.get("milestone") == milestone for line in log.lines()), 30, milestone)


def test_grpc_client_leaves(fleet: SlowLayers, expected: list[int]) -> None:
    log = in_chunk(fleet)
    call = Call(fleet, PROMPT, 8)
    wait_begun(log, fleet)
    call.leave()
    call.join(5)
    fleet.assert_free(PAGES_BACK_S)
    assert fleet.answer() == expected
    fleet.assert_free()


def test_http_client_leaves(fleet: SlowLayers, expected: list[int]) -> None:
    log = in_chunk(fleet)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "stream": True}
    with closing(HTTPConnection(fleet.http)) as client:
        client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        wait_begun(log, fleet)
    fleet.assert_free(PAGES_BACK_S)
    assert fleet.answer() == expected
    fleet.assert_free()


def test_one_leaves_and_one_stays(fleet: SlowLayers, expected: list[int]) -> None:
    """Both are in one chunk, or one after the other: who stays gets the answer."""
    fleet.hold.write_text("layers 0.02")
    goes, stays = Call(fleet, PROMPT[:300], 8), Call(fleet, PROMPT, 8)
    goes.leave()
    goes.join(5)
    stays.join(60)
    assert stays.error is None, stays.error
    assert stays.tokens == expected
    fleet.assert_free()


@pytest.mark.parametrize("fleet", ["split"], indirect=True)
def test_the_deadline_comes(fleet: SlowLayers, expected: list[int]) -> None:
    log = in_chunk(fleet)
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=8))
    with grpc.insecure_channel(fleet.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        list(InferenceStub(channel).Generate(request, timeout=4))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_begun(log, fleet)
    fleet.assert_free(PAGES_BACK_S)
    assert fleet.answer() == expected
    fleet.assert_free()


@pytest.mark.parametrize("fleet", ["split"], indirect=True)
def test_the_server_stops(fleet: SlowLayers, expected: list[int]) -> None:
    """It ends what runs after its drain timeout, and says so of the room before it goes."""
    log = in_chunk(fleet)
    call = Call(fleet, PROMPT, 8)
    wait_begun(log, fleet)
    worker = fleet.prompts
    worker.stop()
    call.join(30)
    assert call.error is not None
    assert call.error.code() is grpc.StatusCode.UNAVAILABLE, call.error
    assert [line["cause"] for line in log.lines() if line["event"] == "room failed"] == ["drained"]
    fleet.hold.write_text("")
    worker.start().wait_ready()
    wait_for(fleet.ready, 20, "usable again")
    assert fleet.answer() == expected
