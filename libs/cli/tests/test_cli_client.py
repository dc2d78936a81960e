"""The chat client against a real gRPC server whose answers the test writes."""

import io
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from rich.console import Console

from baton.cli.chat import say
from baton.cli.client import ChatOptions, connect
from baton.cli.errors import CallError, UsageError
from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class Scripted(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.models = ["m"]
        self.requests: list[inference_pb2.ChatRequest] = []
        self.failed_attempts: list[inference_pb2.FailedAttempt] = []

    async def ListModels(self, request: object, context: object) -> inference_pb2.ListModelsResponse:  # noqa: N802
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id=name) for name in self.models])

    async def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.sampling.max_tokens == 9999:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens=9999 is above the limit 8192")
        yield inference_pb2.GenerateResponse(request_id="r", seed=4)
        yield inference_pb2.GenerateResponse(text="Par")
        if request.sampling.max_tokens == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the decode server was lost")
        yield inference_pb2.GenerateResponse(text="is.")
        yield inference_pb2.GenerateResponse(
            finish_reason=common_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=2),
            report=inference_pb2.RoomReport(room=5, failed_attempts=self.failed_attempts, recomputed_tokens=31 if self.failed_attempts else 0),
        )


@pytest.fixture
async def server() -> AsyncIterator[tuple[Scripted, str]]:
    servicer, running = Scripted(), grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    yield servicer, f"127.0.0.1:{port}"
    await running.stop(None)


async def test_text_streams_and_the_last_message_carries_the_rest(server: tuple[Scripted, str]) -> None:
    servicer, address = server
    parts: list[str] = []
    async with connect(address) as client:
        answer = await client.chat(ChatOptions("m", max_tokens=5, report=True), [("system", "s"), ("user", "u")], parts.append)
    assert parts == ["Par", "is."]
    assert (answer.text, answer.finish, answer.usage.completion_tokens) == ("Paris.", "stop", 2)
    assert answer.report is not None
    assert answer.report.room == 5
    assert answer.ttft_ms is not None
    sent = servicer.requests[0]
    assert [(turn.role, turn.content) for turn in sent.messages] == [("system", "s"), ("user", "u")]
    assert sent.report
    assert (sent.sampling.temperature, sent.sampling.max_tokens) == (0.0, 5)
    assert sent.sampling.HasField("temperature")
    assert not sent.sampling.HasField("seed")


@pytest.mark.parametrize("whole", [False, True])
async def test_servers_that_failed_on_the_way_are_told_also_when_nobody_asks(server: tuple[Scripted, str], whole: bool) -> None:
    servicer, address = server
    console = Console(file=io.StringIO(), width=120)
    async with connect(address) as client:
        await say(client, ChatOptions("m", report=whole), [("user", "u")], console)
        undisturbed = console.file.getvalue()
        failure = common_pb2.Failure(cause="decode_lost", origin=common_pb2.ORIGIN_DECODE, stage=common_pb2.ROOM_STATE_SUCCESS, elapsed_ms=8)
        servicer.failed_attempts = [inference_pb2.FailedAttempt(prefill_instance="p", decode_instance="d", failure=failure, tokens_sent=2)]
        await say(client, ChatOptions("m", report=whole), [("user", "u")], console)
    printed = console.file.getvalue()[len(undisturbed) :]
    assert "failed attempt" not in undisturbed
    assert "decode_lost (decode in SUCCESS) on p and d after 2 tokens, 8 ms" in printed
    assert "tokens recomputed" in printed
    assert ("TTFT" in printed) is whole


async def test_an_error_keeps_its_status_and_the_gateways_words(server: tuple[Scripted, str]) -> None:
    async with connect(server[1]) as client:
        with pytest.raises(CallError, match=r"INVALID_ARGUMENT: max_tokens=9999 is above the limit 8192"):
            await client.chat(ChatOptions("m", max_tokens=9999), [("user", "u")], lambda text: None)


async def test_an_answer_that_breaks_off_ends_its_line(server: tuple[Scripted, str], capsys: pytest.CaptureFixture[str]) -> None:
    async with connect(server[1]) as client:
        with pytest.raises(CallError, match="answered UNAVAILABLE: the decode server was lost"):
            await say(client, ChatOptions("m", max_tokens=1), [("user", "u")], Console(file=io.StringIO()))
    assert capsys.readouterr().out == "Par\n"


async def test_an_address_with_a_scheme_is_none() -> None:
    with pytest.raises(UsageError, match=r"--address is 'http://127\.0\.0\.1:8000', but must be host:port"):
        async with connect("http://127.0.0.1:8000"):
            pass


async def test_nobody_there_names_the_address() -> None:
    async with connect("127.0.0.1:1") as client:
        with pytest.raises(CallError, match=r"no gateway answers gRPC at 127\.0\.0\.1:1: .*Connection refused"):
            await client.model_or_only(None)


async def test_the_only_model_is_chosen_and_several_are_not(server: tuple[Scripted, str]) -> None:
    async with connect(server[1]) as client:
        assert await client.model_or_only(None) == "m"
        assert await client.model_or_only("x") == "x"
        server[0].models = ["a", "b"]
        with pytest.raises(UsageError, match=r"serves 2 models \(a, b\).*--model"):
            await client.model_or_only(None)
