"""A client's mistake is answered with the right code, names field, value and limit, and holds nothing on either server."""

from __future__ import annotations

import json
from collections.abc import Sequence

import grpc
import httpx
import pytest
from fleet import MODEL, Fleet
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1 import worker_pb2
from baton.wire.v1.inference_pb2_grpc import InferenceStub
from baton.wire.v1.worker_pb2_grpc import WorkerStub

pytestmark = pytest.mark.integration

LONGEST_PROMPT = 8191  # the context, less one token for the answer
MESSAGES = [{"role": "user", "content": "Hello"}]
LONG = list(range(100, 200)) * 90

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"

HTTP_CASES: dict[str, tuple[str, object, int, Sequence[str]]] = {
    "a prompt longer than the context": (COMPLETION, {"model": MODEL, "prompt": LONG}, 400, ["prompt", "9000", str(LONGEST_PROMPT)]),
    "an empty prompt": (COMPLETION, {"model": MODEL, "prompt": ""}, 400, ["prompt"]),
    "no messages": (CHAT, {"model": MODEL, "messages": []}, 400, ["messages"]),
    "an unknown model": (CHAT, {"model": "gpt-9", "messages": MESSAGES}, 404, ["model", "gpt-9", MODEL]),
    "malformed JSON": (CHAT, b'{"model": "smollm2", "messages": [', 400, ["JSON"]),
    "not an object": (CHAT, b"[1, 2]", 400, ["object"]),
    "max_tokens 0": (CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 0}, 400, ["max_tokens", "0"]),
    "max_tokens negative": (CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": -5}, 400, ["max_tokens", "-5"]),
    "max_tokens beyond the context": (CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 9000}, 400, ["max_tokens", "9000"]),
    "a body that is not UTF-8": (CHAT, b'{"model": "smollm2", "prompt": "\xff\xfe"}', 400, ["UTF-8"]),
    "too many stop strings": (CHAT, {"model": MODEL, "messages": MESSAGES, "stop": [f"s{i}" for i in range(17)]}, 400, ["stop", "17", "16"]),
    "an empty stop string": (CHAT, {"model": MODEL, "messages": MESSAGES, "stop": [""]}, 400, ["stop"]),
    "a stop string too long": (CHAT, {"model": MODEL, "messages": MESSAGES, "stop": ["x" * 257]}, 400, ["stop", "257", "256"]),
    "a temperature out of range": (CHAT, {"model": MODEL, "messages": MESSAGES, "temperature": 2.5}, 400, ["temperature", "2.5", "2"]),
    "a token outside the vocabulary": (COMPLETION, {"model": MODEL, "prompt": [1, 49152]}, 400, ["49152"]),
    "a field nobody knows": (CHAT, {"model": MODEL, "messages": MESSAGES, "temprature": 1}, 400, ["temprature"]),
}


def states(fleet: Fleet) -> list[tuple[int, int]]:
    loads = [worker.info().load for worker in fleet.workers]
    return [(load.free_pages, load.steps) for load in loads]


@pytest.mark.parametrize("name", HTTP_CASES)
def test_http(shm_fleet: Fleet, name: str) -> None:
    path, body, status, words = HTTP_CASES[name]
    before = states(shm_fleet)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"http://{shm_fleet.http}{path}", content=content, headers={"content-type": "application/json"}, timeout=30)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"], error["message"]
    shm_fleet.assert_free(0.5)
    assert states(shm_fleet) == before, "a server worked for a request that was refused"


GRPC_CASES: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, Sequence[str]]] = {
    "a prompt longer than the context": (
        pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=LONG)), grpc.StatusCode.INVALID_ARGUMENT, ["9000", str(LONGEST_PROMPT)],
    ),
    "an empty prompt": (pb.GenerateRequest(model=MODEL, text=""), grpc.StatusCode.INVALID_ARGUMENT, ["text", "empty"]),
    "no prompt": (pb.GenerateRequest(model=MODEL), grpc.StatusCode.INVALID_ARGUMENT, ["prompt"]),
    "an unknown model": (pb.GenerateRequest(model="gpt-9", text="Hello"), grpc.StatusCode.NOT_FOUND, ["gpt-9", MODEL]),
    "max_tokens 0": (
        pb.GenerateRequest(model=MODEL, text="Hello", sampling=pb.SamplingParams(max_tokens=0)), grpc.StatusCode.INVALID_ARGUMENT, ["max_tokens"],
    ),
    "max_tokens negative": (
        pb.GenerateRequest(model=MODEL, text="Hello", sampling=pb.SamplingParams(max_tokens=-1)), grpc.StatusCode.INVALID_ARGUMENT, ["max_tokens"],
    ),
    "too many stop strings": (
        pb.GenerateRequest(model=MODEL, text="Hello", sampling=pb.SamplingParams(stop=["x"] * 17)), grpc.StatusCode.INVALID_ARGUMENT, ["stop", "17"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRPC_CASES)
def test_grpc(shm_fleet: Fleet, name: str) -> None:
    request, code, words = GRPC_CASES[name]
    with grpc.insecure_channel(shm_fleet.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        list(InferenceStub(channel).Generate(request, timeout=30))
    error = caught.value
    assert error.code() is code
    for word in words:
        assert word in error.details(), error.details()
    details = rpc_status.from_call(error).details
    violations = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violations) for detail in details), "no google.rpc.BadRequest in the status"
    assert violations.field_violations[0].field
    shm_fleet.assert_free(0.5)


def test_prompt_longer_than_one_sides_pool(model_path, tmp_path) -> None:
    """The smaller pool of the two sides is the limit, and the message says whose it is."""
    fleet = Fleet(model_path, tmp_path)
    fleet.prefill()
    fleet.decode("--num-pages", "20")
    fleet.start()
    body = {"model": MODEL, "prompt": list(range(100, 500)), "max_tokens": 4}
    response = httpx.post(f"http://{fleet.http}/v1/completions", json=body, timeout=30)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert "400" in message
    assert "319" in message, message  # 20 pages of 16 tokens, less one for the answer
    assert "decode" in message, message
    fleet.assert_free(0.5)
    fleet.close()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_direct_request_is_told_where_the_gateway_is(shm_fleet: Fleet, kind: str) -> None:
    worker = shm_fleet.by_kind(kind)
    with grpc.insecure_channel(worker.address()) as channel, pytest.raises(grpc.RpcError) as caught:
        list(InferenceStub(channel).Generate(pb.GenerateRequest(model=MODEL, text="Hello"), timeout=30))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert shm_fleet.grpc in caught.value.details(), caught.value.details()
    assert kind in caught.value.details()


def test_start_without_a_room_is_refused(shm_fleet: Fleet) -> None:
    worker = shm_fleet.by_kind("decode")
    start = worker_pb2.Command(start=worker_pb2.Start(room=0, prompt_token_ids=[1, 2], plain=worker_pb2.PlainLeg()))
    attach = worker_pb2.Command(attach=worker_pb2.Attach(gateway_id="test", gateway_address=shm_fleet.grpc))
    with grpc.insecure_channel(worker.address()) as channel:
        reports = WorkerStub(channel).Session(iter([attach, start]), timeout=10)
        try:
            failures = [event.failed for report in reports for event in report.events if event.WhichOneof("event") == "failed"]
            text = failures[0].message
        except grpc.RpcError as error:
            text = error.details()
    assert "room" in text
    assert "gateway" in text
    shm_fleet.assert_free()
