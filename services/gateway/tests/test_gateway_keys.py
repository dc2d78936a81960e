"""API keys at both fronts: who gets in, what is said to those who do not, and a file that changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack, ask, eventually, greedy

from baton.gateway.callers import ANONYMOUS, Doorkeeper
from baton.gateway.errors import ForbiddenError, UnauthenticatedError
from baton.servicekit import KeyLimits, KeyRole, new_key, watch_api_keys
from baton.wire.v1 import inference_pb2

KEY, RECORD = new_key(KeyRole.CLIENT)
ADMIN, ADMIN_RECORD = new_key(KeyRole.ADMIN)
STRANGER, _ = new_key(KeyRole.CLIENT)

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{RECORD.line()}\n{ADMIN_RECORD.line()}\n")
    return path


@pytest.fixture
async def guarded(stack_of, key_file: Path) -> Stack:
    stack: Stack = await stack_of(api_key_file=key_file)
    return stack


async def post(stack: Stack, *authorization: str, path: str = "/v1/completions", method: str = "POST") -> httpx.Response:
    headers = [("authorization", value) for value in authorization]
    async with httpx.AsyncClient(base_url=stack.http, timeout=20) as client:
        return await client.request(method, path, headers=headers, json=BODY if method == "POST" else None)


async def test_a_key_opens_both_fronts(guarded: Stack) -> None:
    metadata = (("authorization", f"Bearer {KEY}"),)
    messages = [message async for message in guarded.stub.Generate(ask(), metadata=metadata, timeout=20)]
    assert messages[-1].finish_reason
    request = inference_pb2.ChatRequest(model=MODEL, messages=[inference_pb2.ChatMessage(role="user", content="hello")], sampling=greedy())
    assert [message async for message in guarded.stub.Chat(request, metadata=metadata, timeout=20)]
    assert (await guarded.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)).models[0].id == MODEL
    assert (await post(guarded, f"Bearer {KEY}")).status_code == 200
    assert (await post(guarded, f"bearer  {KEY}")).status_code == 200  # RFC 7235: the scheme has no case
    assert guarded.gateway.doorkeeper.counters == {"accepted": 5}


@pytest.mark.parametrize(
    ("shown", "status", "cause"),
    [
        ([], 401, "key_missing"),
        ([f"Bearer {STRANGER}"], 401, "key_unknown"),
        ([f"Bearer {KEY[:-1]}"], 401, "key_unknown"),
        ([f"Bearer {RECORD.digest.hex()}"], 401, "key_unknown"),
        ([f"Basic {KEY}"], 401, "key_malformed"),
        ([KEY], 401, "key_malformed"),
        (["Bearer"], 401, "key_malformed"),
        ([f"Bearer {STRANGER}", f"Bearer {KEY}"], 401, "key_malformed"),
        ([f"Bearer {ADMIN}"], 403, "key_role"),
    ],
)
async def test_whoever_has_no_key_is_refused_by_name_counted_and_logged(
    guarded: Stack, capsys: pytest.CaptureFixture[str], shown: list[str], status: int, cause: str
) -> None:
    for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET"), (f"/v1/models/{MODEL}", "GET")):
        response = await post(guarded, *shown, path=path, method=method)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, cause)
        assert error["type"] == {401: "authentication_error", 403: "permission_error"}[status]
        assert ("www-authenticate" in response.headers) == (status == 401)
    metadata = tuple(("authorization", value) for value in shown)
    code = grpc.StatusCode.UNAUTHENTICATED if status == 401 else grpc.StatusCode.PERMISSION_DENIED
    for call in (guarded.stub.Generate(ask(), metadata=metadata), guarded.stub.Chat(inference_pb2.ChatRequest(), metadata=metadata)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is code
        assert cause in f"{caught.value.details()}"
    with pytest.raises(grpc.aio.AioRpcError):
        await guarded.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
    num_refused = 6
    if status == 401:  # a client may watch the console
        assert (await post(guarded, *shown, path="/console/feed", method="GET")).status_code == 401
        num_refused += 1
    assert guarded.gateway.doorkeeper.counters == {cause: num_refused}
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if cause in line]
    assert len(lines) == num_refused, "one line each"
    assert not [line for line in lines if STRANGER in line or KEY[:-1] in line]
    assert all(not worker.starts for worker in guarded.workers)


async def test_a_body_is_not_read_for_a_stranger(guarded: Stack) -> None:
    """Refused before a byte of it: it may be 16 MiB."""
    async with httpx.AsyncClient(base_url=guarded.http, timeout=20) as client:
        response = await client.post("/v1/completions", content=b"{ not json")
    assert response.json()["error"]["code"] == "key_missing"


async def test_probes_need_no_key_and_learn_nothing_of_the_fleet(guarded: Stack) -> None:
    assert (await post(guarded, path="/health", method="GET")).status_code == 200
    assert (await post(guarded, path="/ready", method="GET")).json() == {"ready": True, "draining": False}
    assert (await post(guarded, f"Bearer {KEY}", path="/ready", method="GET")).json()["routes"] == 1
    assert guarded.gateway.doorkeeper.counters == {}, "a probe is no refusal"


async def test_keys_come_and_go_while_it_serves(guarded: Stack, key_file: Path) -> None:
    second, record = new_key(KeyRole.CLIENT)
    assert (await post(guarded, f"Bearer {second}")).status_code == 401
    await asyncio.to_thread(key_file.write_text, record.line() + "\n")
    keys = guarded.gateway._watched[0]
    await eventually(lambda: keys.counters["reloaded"] == 1)
    assert (await post(guarded, f"Bearer {second}")).status_code == 200
    assert (await post(guarded, f"Bearer {KEY}")).status_code == 401
    await asyncio.to_thread(key_file.write_text, "half of a li")
    await eventually(lambda: keys.counters["reload_failed"] == 1)
    assert (await post(guarded, f"Bearer {second}")).status_code == 200  # what was in force stays


async def test_prefixes_are_shared_by_those_with_the_same_key(guarded: Stack) -> None:
    """Else the time of an answer would tell one tenant what another one asked."""
    async for _ in guarded.stub.Generate(ask(), metadata=(("authorization", f"Bearer {KEY}"),), timeout=20):
        pass
    salts = {start.cache_salt for worker in guarded.workers for start in worker.starts}
    assert salts == {RECORD.id}


async def test_without_keys_all_share_their_prefixes(split: Stack) -> None:
    async for _ in split.stub.Generate(ask(), timeout=20):
        pass
    assert {start.cache_salt for worker in split.workers for start in worker.starts} == {""}


async def test_without_a_file_everybody_may_ask(split: Stack) -> None:
    assert (await post(split)).status_code == 200
    assert (await post(split, "Bearer sk-of-another-house")).status_code == 200
    assert split.gateway.doorkeeper.client([]) is ANONYMOUS


def test_operators_have_keys_of_their_own(key_file: Path) -> None:
    doorkeeper = Doorkeeper(watch_api_keys("--api-key-file", key_file))
    assert doorkeeper.require_admin([f"Bearer {ADMIN}"]).key_id == ADMIN_RECORD.id
    with pytest.raises(ForbiddenError, match="role client"):
        doorkeeper.require_admin([f"Bearer {KEY}"])
    with pytest.raises(UnauthenticatedError):
        doorkeeper.require_admin([])
    with pytest.raises(ForbiddenError, match="has no keys, so nobody may change its fleet"):
        Doorkeeper(None).require_admin([f"Bearer {ADMIN}"])
    assert Doorkeeper(None).operator([]).key_id == ""
    assert doorkeeper.operator([f"Bearer {ADMIN}"]).key_id == ADMIN_RECORD.id
    for shown, refusal in (([f"Bearer {KEY}"], ForbiddenError), ([], UnauthenticatedError)):
        with pytest.raises(refusal):
            doorkeeper.operator(shown)


def test_a_keys_own_limits_stand_before_the_gateways(tmp_path: Path) -> None:
    own: Any = new_key(KeyRole.CLIENT, KeyLimits(max_concurrent=7, weight=2.0))
    path = tmp_path / "keys"
    path.write_text(own[1].line())
    doorkeeper = Doorkeeper(watch_api_keys("--api-key-file", path), KeyLimits(1, 60, None))
    assert doorkeeper.client([f"Bearer {own[0]}"]).limits == KeyLimits(7, 60, None, 2.0)
