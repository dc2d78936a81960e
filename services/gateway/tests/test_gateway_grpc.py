"""baton.v1.Inference end to end over real gRPC, in front of scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_harness import MODEL, SamplingParams, Stack, ask, greedy, says
from gateway_worker import LENGTH, STOP
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.wire.status import failure_from_error, field_violations
from baton.wire.v1 import common_pb2, inference_pb2


async def test_a_split_request_streams_text_usage_and_report(split: Stack) -> None:
    reply = await split.reply(ask("hello world"))
    first, last = reply.messages[0], reply.last
    assert reply.text == "the answer is forty two"
    assert reply.ids == says(split.tokenizer, "the answer is forty two")
    assert first.request_id
    assert first.usage.prompt_tokens == len(says(split.tokenizer, "hello world", eos=False))
    assert last.finish_reason == STOP
    assert last.usage == inference_pb2.Usage(prompt_tokens=first.usage.prompt_tokens, completion_tokens=len(reply.ids))
    await split.settled()


async def test_the_report_names_states_servers_transfer_and_times(split: Stack) -> None:
    report = (await split.reply()).last.report
    assert [span.state for span in report.states] == [1, 2, 3, 4]
    assert (report.prefill_instance, report.decode_instance) == ("prefill-0", "decode-0")
    assert (report.transfer.transport, report.transfer.bytes, report.transfer.puts) == ("sysv", 46_080, 3)
    # decode's word on the digest and on what was exposed
    assert (report.transfer.digest_checked, report.transfer.exposed_ms) == (True, 0.5)
    assert 0 < report.prefill_started_ms <= report.ttft_ms <= report.total_ms
    assert report.mean_itl_ms > 0
    ends = [span.start_ms + span.duration_ms for span in report.states]
    starts = [span.start_ms for span in report.states]
    assert ends[:-1] == pytest.approx(starts[1:], abs=1e-6)
    assert ends[-1] == pytest.approx(report.total_ms, abs=1e-6)


async def test_both_legs_are_started_with_the_same_room_and_name_each_other(split: Stack) -> None:
    await split.reply(ask(sampling=greedy(seed=7, stop_token_ids=[9])))
    prefill, decode = split.prefill.starts[0], split.decode.starts[0]
    assert prefill.room == decode.room
    assert 0 < prefill.room < 2**63
    assert prefill.prefill.decode_instance_id == "decode-0"
    assert decode.decode.prefill_instance_id == "prefill-0"
    assert decode.decode.bootstrap_address == (await split.prefill.Describe(None, None)).bootstrap_address  # type: ignore[arg-type]
    assert prefill.sampling == decode.sampling
    assert (prefill.sampling.seed, prefill.sampling.temperature, prefill.sampling.top_p) == (7, 0.0, 1.0)
    assert list(prefill.sampling.stop_token_ids) == [2, 9]  # the model's end of sequence and the client's
    assert (prefill.bootstrap_timeout_ms, prefill.waiting_timeout_ms) == (300_000, 300_000)
    assert 0 < prefill.deadline_ms <= 20_100  # gRPC sends three digits, rounded up


async def test_rooms_are_single_use_and_drawn_at_random(split: Stack) -> None:
    for _ in range(20):
        await split.reply(ask(sampling=greedy(max_tokens=1)))
    rooms = [start.room for start in split.prefill.starts]
    assert len(set(rooms)) == 20
    assert max(rooms) > 2**56  # 20 draws of 63 bit below it: one chance in 2**140


async def test_workers_are_told_the_gateway_and_decode_its_peers(split: Stack) -> None:
    await split.decode.wait(lambda: bool(split.decode.peers))
    assert split.decode.peers[-1] == [(await split.prefill.Describe(None, None)).bootstrap_address]  # type: ignore[arg-type]
    assert split.prefill.attached[0].gateway_id == "gateway-test"
    assert split.prefill.attached[0].gateway_address == split.grpc_address


async def test_plain_has_a_shorter_path(plain: Stack) -> None:
    reply = await plain.reply()
    assert reply.text == "the answer is forty two"
    assert reply.states == ["WAITING", "SUCCESS"]
    assert not reply.last.report.HasField("transfer")
    assert plain.of("plain").starts[0].WhichOneof("leg") == "plain"
    await plain.settled()


async def test_chat_goes_through_the_template(split: Stack) -> None:
    reply = await split.chat("hello")
    prompt = list(split.prefill.starts[0].prompt_token_ids)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == says(split.tokenizer, text, eos=False)
    assert reply.text == "the answer is forty two"


async def test_max_tokens_ends_with_length_and_token_ids_are_taken_as_they_are(split: Stack) -> None:
    reply = await split.reply(ask(text=None, token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), sampling=greedy(max_tokens=3)))
    assert list(split.prefill.starts[0].prompt_token_ids) == [5, 6, 7]
    assert reply.last.finish_reason == LENGTH
    assert len(reply.ids) == 3


async def test_an_answer_of_one_token(split: Stack) -> None:
    reply = await split.reply(ask(sampling=greedy(max_tokens=1)))
    assert len(reply.ids) == 1
    assert reply.last.usage.completion_tokens == 1
    assert reply.last.report.mean_itl_ms == 0
    await split.settled()


async def test_a_stop_string_cuts_the_answer_and_ends_the_legs(stack_of: Callable[..., Any]) -> None:
    stack: Stack = await stack_of(answer="the answer is forty two and much more of this")
    reply = await stack.reply(ask(sampling=greedy(max_tokens=200, stop=["rty t"])))
    assert reply.text == "the answer is fo"
    assert reply.last.finish_reason == STOP
    assert reply.last.usage.completion_tokens == len(reply.ids)
    spelled = stack.tokenizer.decode(reply.ids)
    assert "rty t" in spelled
    assert "rty t" not in stack.tokenizer.decode(reply.ids[:-1])
    await stack.settled()
    (abort,) = stack.decode.aborts
    assert (abort.failure.cause, abort.failure.origin) == ("stop_string", common_pb2.ORIGIN_CLIENT)  # no server counts a failure that alerts look at


async def test_a_seed_is_drawn_and_reported(split: Stack) -> None:
    seeds = {(await split.reply(ask(sampling=greedy(max_tokens=1)))).messages[0].seed for _ in range(4)}
    assert len(seeds) == 4
    assert {start.sampling.seed for start in split.decode.starts} == seeds


async def test_models_health_and_reflection(split: Stack) -> None:
    models = await split.stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(model.id, model.max_model_len, model.vocab_size) for model in models.models] == [(MODEL, 512, split.tokenizer.vocab_size)]
    health = health_pb2_grpc.HealthStub(split.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))  # type: ignore[misc]
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(split.grpc_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)  # type: ignore[no-untyped-call]
        services = await asyncio.to_thread(database.get_services)
    assert "baton.v1.Inference" in services


async def test_many_at_once(split: Stack) -> None:
    replies = await asyncio.gather(*(split.reply(ask(f"prompt {number}")) for number in range(64)))
    assert {reply.text for reply in replies} == {"the answer is forty two"}
    await split.settled()
    assert split.gateway.rooms.outcomes == {"success": 64}


LONG = "x" * 600

REFUSALS: list[tuple[dict[str, Any], grpc.StatusCode, str, list[str]]] = [
    ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "text", ["text is empty"]),
    ({"text": None}, grpc.StatusCode.INVALID_ARGUMENT, "prompt", ["set text or token_ids"]),
    ({"text": LONG}, grpc.StatusCode.INVALID_ARGUMENT, "text", ["600 tokens", "limit is 511", "context of"]),
    ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "model", ["'other'", "'tiny'"]),
    ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT, "model", ["model is empty"]),
    ({"sampling": greedy(max_tokens=0)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_tokens", ["=0 ", "[1, 511]"]),
    ({"sampling": greedy(max_tokens=-4)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_tokens", ["=-4 ", "[1, 511]"]),
    ({"sampling": greedy(max_tokens=512)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_tokens", ["=512 ", "of 512 tokens"]),
    ({"sampling": greedy(min_tokens=33)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.min_tokens", ["=33 ", "[0, 32]"]),
    ({"sampling": greedy(temperature=2.5)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature", ["=2.5 ", "[0, 2]"]),
    ({"sampling": greedy(temperature=float("nan"))}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature", ["=nan "]),
    ({"sampling": greedy(top_p=0.0)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p", ["=0.0 ", "(0, 1]"]),
    ({"sampling": greedy(top_k=-1)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_k", ["=-1 "]),
    ({"sampling": greedy(min_p=1.5)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.min_p", ["=1.5 "]),
    ({"sampling": greedy(stop=["x"] * 17)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.stop", ["17 strings", "limit is 16"]),
    ({"sampling": greedy(stop=["y" * 257])}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.stop[0]", ["257 characters", "limit is 256"]),
    ({"sampling": greedy(stop=["a", ""])}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.stop[1]", ["is empty"]),
    ({"sampling": greedy(stop_token_ids=[1] * 65)}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.stop_token_ids", ["65 ids", "limit is 64"]),
    ({"text": None, "token_ids": inference_pb2.TokenIds(ids=[1, 9999])}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids[1]", ["=9999 "]),
    ({"text": None, "token_ids": inference_pb2.TokenIds()}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids", ["is empty"]),
    ({"request_id": "r" * 129}, grpc.StatusCode.INVALID_ARGUMENT, "request_id", ["129 characters", "128"]),
]


@pytest.mark.parametrize(("change", "code", "field", "parts"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_callers_mistake_names_field_value_and_limit(
    split: Stack, change: dict[str, Any], code: grpc.StatusCode, field: str, parts: list[str]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await split.reply(ask(**change))
    error = caught.value
    assert error.code() is code
    assert [name for name, _ in field_violations(error)] == [field]
    for part in parts:
        assert part in (error.details() or "")
    assert LONG not in (error.details() or "")
    assert failure_from_error(error, origin=common_pb2.ORIGIN_GATEWAY, cause="").origin == common_pb2.ORIGIN_CLIENT
    # nothing was reserved
    assert split.prefill.starts == []
    assert split.decode.starts == []
    await split.settled()


async def test_the_pool_of_either_side_bounds_the_prompt(stack_of: Callable[..., Any]) -> None:
    for role, words in (("prefill", "KV pool of prefill server"), ("decode", "KV pool of decode server")):
        stack: Stack = await stack_of(worker={role: {"total_pages": 2}})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.reply(ask("x" * 40))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in (caught.value.details() or "")
        assert "2 pages of 16 tokens" in (caught.value.details() or "")


async def test_the_default_of_max_tokens_is_what_the_tighter_side_holds(stack_of: Callable[..., Any]) -> None:
    stack: Stack = await stack_of(worker={"decode": {"total_pages": 4}})
    await stack.reply(ask(text=None, token_ids=inference_pb2.TokenIds(ids=[5] * 10), sampling=SamplingParams(temperature=0)))
    assert stack.decode.starts[0].sampling.max_tokens == 4 * 16 - 10


async def test_messages_that_are_no_messages(split: Stack) -> None:
    for raw, parts in ((b"\x0a\x02\xff\xfe", ["UTF-8"]), (b"\xff\xff\xff", ["cannot be read"])):
        call = split.channel.unary_stream("/baton.v1.Inference/Generate", request_serializer=lambda data: data)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(raw, timeout=10):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for part in parts:
            assert part in (caught.value.details() or "")


async def test_a_long_name_in_a_refusal_still_fits_the_trailers(split: Stack) -> None:
    for request in (ask(model="m" * 100_000), ask(model="\u00e9" * 100_000)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await split.reply(request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND, caught.value.details()
        assert "this gateway serves 'tiny'" in (caught.value.details() or "")
        assert [name for name, _ in field_violations(caught.value)] == ["model"]


async def test_a_message_is_bounded_as_a_body_is(stack_of: Callable[..., Any]) -> None:
    stack: Stack = await stack_of(max_body_bytes=65_536)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.reply(ask(text="x" * 70_000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "65536" in (caught.value.details() or "")
    await stack.settled()


async def test_chat_mistakes(split: Stack) -> None:
    cases = [
        (inference_pb2.ChatRequest(model=MODEL), "messages"),
        (inference_pb2.ChatRequest(model=MODEL, messages=[inference_pb2.ChatMessage(role="robot", content="x")]), "messages[0].role"),
        (inference_pb2.ChatRequest(model=MODEL, messages=[inference_pb2.ChatMessage(role="tool", content="x")]), "messages"),
    ]
    for request, field in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in split.stub.Chat(request, timeout=10):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [name for name, _ in field_violations(caught.value)] == [field]
