"""Whatever a client sends over gRPC and HTTP: an answer, or its own mistake by name; never the gateway's failure, and nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_harness import MODEL, Stack
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.wire.v1 import inference_pb2 as pb

#: What a client's own words can lead to. UNAVAILABLE, INTERNAL and UNKNOWN are not among them.
TAKEN_OR_REFUSED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
STATUSES = {200, 400, 404, 413}

one_stack = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)

texts = st.one_of(st.sampled_from([MODEL, "user", "assistant", "system", "", "<|im_end|>", "{{ 7 * 7 }}", "\x00", "\ufeff"]), st.text(max_size=40))
integers = st.sampled_from([0, 1, 2, 15, 16, 255, 511, 512, 513, 2**31 - 1])
floats = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 2.0, 1e-45, 1e-40, float("nan"), float("inf"), -1.0]), st.floats(width=32))

_SCALARS: dict[int, Callable[[], st.SearchStrategy[Any]]] = {
    FieldDescriptor.TYPE_STRING: lambda: texts,
    FieldDescriptor.TYPE_BOOL: st.booleans,
    FieldDescriptor.TYPE_FLOAT: lambda: floats,
    FieldDescriptor.TYPE_INT32: lambda: st.one_of(integers, st.integers(-(2**31), 2**31 - 1)),
    FieldDescriptor.TYPE_SINT32: lambda: st.one_of(integers, st.integers(-(2**31), 2**31 - 1)),
    FieldDescriptor.TYPE_UINT32: lambda: st.one_of(integers, st.integers(0, 2**32 - 1)),
    FieldDescriptor.TYPE_UINT64: lambda: st.one_of(integers, st.integers(0, 2**64 - 1)),
}


def messages(descriptor: Descriptor, kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of a kind: each field absent or there, with values at and around every limit."""

    def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            return messages(field.message_type, getattr(pb, field.message_type.name))
        return _SCALARS[field.type]()

    def several(field: FieldDescriptor) -> st.SearchStrategy[Any]:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = entry.fields
            return st.dictionaries(values(key), values(value), max_size=20)
        return st.lists(values(field), max_size=20)

    fields = {field.name: several(field) if field.is_repeated else values(field) for field in descriptor.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: kind(**_one_of_each(descriptor, given)))


def _one_of_each(descriptor: Descriptor, given: dict[str, Any]) -> dict[str, Any]:
    """Of alternatives the one that comes first."""
    for alternatives in descriptor.oneofs:
        names = [field.name for field in alternatives.fields if field.name in given]
        for name in names[1:]:
            del given[name]
    return given


requests = st.one_of(
    messages(pb.GenerateRequest.DESCRIPTOR, pb.GenerateRequest).map(lambda message: ("Generate", message)),
    messages(pb.ChatRequest.DESCRIPTOR, pb.ChatRequest).map(lambda message: ("Chat", message)),
)


#: Of each message, for a request that asks for little: of so many fields at random one is always wrong.
DEMANDING = {"sampling", "tools", "tool_choice", "priority", "tool_calls", "tool_call_id", "reasoning", "name"}


def plausible(call: tuple[str, Message], *, asks_little: bool) -> tuple[str, Message]:
    """So that what comes behind the first check is met too."""
    method, message = call
    message.model = MODEL  # type: ignore[attr-defined]
    if asks_little:
        for part in (message, *getattr(message, "messages", ())):
            for name in DEMANDING & set(part.DESCRIPTOR.fields_by_name):
                part.ClearField(name)
            if "role" in part.DESCRIPTOR.fields_by_name:
                part.role = "user"  # type: ignore[attr-defined]
    return method, message


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A message's bytes with some of them changed, cut off or added; or any bytes."""
    method, message = draw(requests)
    raw = bytearray(message.SerializeToString())
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, max(0, len(raw) - 1)))
        raw[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return method, draw(st.one_of(st.just(bytes(raw)), st.binary(max_size=200)))


async def sent(stack: Stack, method: str, raw: bytes) -> grpc.StatusCode:
    call = stack.channel.unary_stream(f"/baton.v1.Inference/{method}", request_serializer=lambda data: data)(raw, timeout=20)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code = await call.code()
    assert isinstance(code, grpc.StatusCode)
    assert code is grpc.StatusCode.OK or await call.details(), f"{code} without a word"
    return code


async def nothing_is_left(stack: Stack, num_tasks: int) -> None:
    await stack.settled()
    for _ in range(200):
        if len(asyncio.all_tasks()) <= num_tasks + 3:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"tasks were {num_tasks}, are {len(asyncio.all_tasks())}: {[task.get_name() for task in asyncio.all_tasks()]}")


@pytest.mark.timeout(900)
async def test_any_message_over_grpc(split: Stack) -> None:
    seen: dict[grpc.StatusCode, int] = {}
    num_tasks = len(asyncio.all_tasks())
    asked = st.builds(lambda call, little: plausible(call, asks_little=little), requests, st.booleans())
    for strategy in (asked.map(lambda call: (call[0], call[1].SerializeToString())), damaged()):
        for method, raw in _examples(strategy):
            code = await sent(split, method, raw)
            assert code in TAKEN_OR_REFUSED, f"{method} {raw!r} ended with {code}"
            seen[code] = seen.get(code, 0) + 1
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= set(seen), f"the messages do not reach both: {seen}"
    await nothing_is_left(split, num_tasks)


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
NAMES = (
    "max_tokens",
    "temperature",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "stop_token_ids",
    "request_id",
    "n",
    "tools",
    "messages",
    "prompt",
    "tool_choice",
    "response_format",
    "structured_outputs",
)
sound = st.sampled_from([{"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}, {"model": MODEL, "prompt": "hello"}])
bodies = st.builds(lambda body, fields: body | fields, sound, st.dictionaries(st.sampled_from(NAMES), JSON | integers, max_size=3))
raw_bodies = bodies.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=100) | JSON.map(lambda body: json.dumps(body).encode())


@pytest.mark.timeout(900)
async def test_any_body_over_http(split: Stack) -> None:
    num_tasks = len(asyncio.all_tasks())
    seen: dict[int, int] = {}
    async with httpx.AsyncClient(base_url=split.http, timeout=20) as client:
        for raw in _examples(raw_bodies):
            for path in ("/v1/chat/completions", "/v1/completions"):
                response = await client.post(path, content=raw)
                assert response.status_code in STATUSES, f"{path} {raw!r}: {response.status_code} {response.text}"
                seen[response.status_code] = seen.get(response.status_code, 0) + 1
    assert {200, 400} <= set(seen), f"the bodies do not reach both: {seen}"
    await nothing_is_left(split, num_tasks)


def _examples(strategy: st.SearchStrategy[Any]) -> list[Any]:
    """As many as the profile says, drawn before anything is sent: one event loop has the gateway and the client, and the draws are not async."""
    found: list[Any] = []

    @one_stack
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found
