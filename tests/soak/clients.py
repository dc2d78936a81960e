"""Many clients at once, over real sockets, half of them gRPC and half of them OpenAI HTTP; each request is judged."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx
from fleet import MODEL

from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.status import failure_from_error, origin_name, stage_name
from baton.wire.v1 import common_pb2
from baton.wire.v1 import inference_pb2 as pb
from baton.wire.v1.inference_pb2_grpc import InferenceStub

#: A request that has not ended this long after its deadline hangs.
HANGS_AFTER_S = 15.0
CANCELLED_PART = 0.08


@dataclass(frozen=True)
class Question:
    """One prompt with its sampling. num_answers: to the one prompt. form: a regular expression that each answer is held to; empty: any text."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    max_tokens: int
    num_answers: int = 1
    form: str = ""


#: What a request was answered with, an item for each answer: tokens over gRPC, text over HTTP.
Answers = list[list[int]] | list[str]

#: Long enough that no answer here comes to its end.
FORM = "[a-z ,]{80,200}"
TEXT = Path(__file__).parents[2] / "LICENSE"


def questions(model_path: Path, count: int, seed: int, answers: tuple[int, ...] = (4, 6, 8)) -> list[Question]:
    """Real text, and short, so that two cores can answer hundreds at once; every other one is sampled, every sixth is answered twice, every fifth is
    held to a form. `answers`: their lengths."""
    from tokenizers import Tokenizer

    dice = random.Random(seed)
    ids = Tokenizer.from_file(str(model_path / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    found = []
    for number in range(count):
        first, length = dice.randrange(len(ids) - 40), dice.choice((5, 9, 17, 24))
        prompt, num_answers, form = tuple(ids[first : first + length]), 2 if number % 6 == 5 else 1, FORM if number % 5 == 4 else ""
        found.append(Question(prompt, 0.9 * (number % 2), number, dice.choice(answers), num_answers, form))
    return found


@dataclass
class Judgement:
    """right: as the undisturbed run. failed: (code, cause, origin, stage) -> how many. not_taken: there was no connection to send it over.

    wrong, nameless, hung: in words; there must be none.
    """

    right: int = 0
    cancelled: int = 0
    cut_off: int = 0
    not_taken: int = 0
    failed: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    nameless: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    @property
    def total(self) -> int:
        return self.right + self.cancelled + self.cut_off + self.not_taken + self.num_failed + len(self.wrong) + len(self.nameless) + len(self.hung)


class NamedError(Exception):
    """A failure that says who ended the request, in which stage and why."""

    def __init__(self, code: str, cause: str, origin: str, stage: str) -> None:
        super().__init__(code, cause, origin, stage)
        self.words = (code, cause, origin, stage)


class GatewayGoneError(Exception):
    """The connection to the gateway broke: nobody was left who could have said why."""


class NotTakenError(Exception):
    """There was no connection to the gateway: it never had the request."""


async def over_grpc(stub: InferenceStub, question: Question, deadline_s: float) -> list[list[int]]:
    sampling = pb.SamplingParams(temperature=question.temperature, seed=question.seed, max_tokens=question.max_tokens, n=question.num_answers)
    if question.form:
        sampling.structured.regex = question.form
    else:
        sampling.ignore_eos = True
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=question.prompt), sampling=sampling)
    answers: list[list[int]] = [[] for _ in range(question.num_answers)]
    try:
        async for message in stub.Generate(request, timeout=deadline_s):
            answers[message.choice] += message.token_ids
        return answers
    except grpc.aio.AioRpcError as error:
        failure = failure_from_error(error, origin=common_pb2.ORIGIN_UNSPECIFIED, cause="")
        if failure.cause:
            raise NamedError(error.code().name, failure.cause, origin_name(failure.origin), stage_name(failure.stage)) from error
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise NamedError("DEADLINE_EXCEEDED", "the client's own clock", "client", "UNSPECIFIED") from error
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            never = (error.details() or "").startswith("failed to connect")
            raise (NotTakenError if never else GatewayGoneError)(error.details()) from error
        raise


async def over_http(client: httpx.AsyncClient, question: Question, *, stream: bool) -> list[str]:
    body: dict[str, object] = {"model": MODEL, "prompt": list(question.prompt), "temperature": question.temperature, "seed": question.seed}
    body |= {"max_tokens": question.max_tokens, "n": question.num_answers, "stream": stream}
    body |= {"structured_outputs": {"regex": question.form}} if question.form else {"ignore_eos": True}
    try:
        if not stream:
            response = await client.post("/v1/completions", json=body)
            if response.status_code != 200:
                raise _named(response.status_code, response.json())
            return [choice["text"] for choice in sorted(response.json()["choices"], key=lambda choice: choice["index"])]
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise _named(response.status_code, json.loads(await response.aread()))
            return await _texts_of(response, question.num_answers)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise NotTakenError from error
    except httpx.TransportError as error:
        raise GatewayGoneError(repr(error)) from error


async def _texts_of(response: httpx.Response, num_answers: int) -> list[str]:
    texts = [""] * num_answers
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return texts
        if data:
            event = json.loads(data)
            if "error" in event:
                raise _named(response.status_code, event)
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    raise GatewayGoneError("a stream without an end")


def _named(status: int, body: dict[str, dict[str, str]]) -> NamedError:
    error = body["error"]
    return NamedError(f"HTTP {status}", error["code"], error.get("origin", "gateway"), error.get("stage", "UNSPECIFIED"))


class Client:
    """Number `number` of many: gRPC when it is even, HTTP when it is odd. It has a connection of its own to each gateway."""

    def __init__(self, number: int, gateways: list[tuple[str, str]], deadline_s: float, seed: int) -> None:
        """gateways: (gRPC, HTTP) host:port of each."""
        self.number = number
        self.dice = random.Random(seed * 100_003 + number)
        self._deadline_s = deadline_s
        self._channels = []
        self._https = []
        if number % 2 == 0:
            self._channels = [grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) for address, _ in gateways]
        else:
            self._https = [httpx.AsyncClient(base_url=f"http://{address}", timeout=deadline_s + HANGS_AFTER_S) for _, address in gateways]

    @property
    def protocol(self) -> str:
        return "gRPC" if self._channels else "HTTP"

    async def answer_of(self, question: Question, gateway: int) -> Answers:
        if self._channels:
            return await over_grpc(InferenceStub(self._channels[gateway]), question, self._deadline_s)
        return await over_http(self._https[gateway], question, stream=bool(self.dice.getrandbits(1)))

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        for http in self._https:
            await http.aclose()


async def ask(client: Client, question: Question, right: Answers, gateway: int, down: Callable[[int], bool], into: Judgement) -> bool:
    """One judged request; True when it was answered. `down`: whether that gateway is being restarted, or just was."""
    leaves_after_s = client.dice.uniform(0.05, 4.0) if client.dice.random() < CANCELLED_PART else None
    began = time.monotonic()
    what = f"client {client.number} ({client.protocol}), {question}"
    try:
        async with asyncio.timeout(client._deadline_s + HANGS_AFTER_S if leaves_after_s is None else leaves_after_s):
            answer = await client.answer_of(question, gateway)
    except TimeoutError:
        if leaves_after_s is None:
            into.hung.append(f"{what}: no end {time.monotonic() - began:.0f} s after it was sent")
        else:
            into.cancelled += 1
        return False
    except NamedError as error:
        into.failed[error.words] += 1
        return False
    except NotTakenError:
        into.not_taken += 1
        return False
    except GatewayGoneError as error:
        if down(gateway):
            into.cut_off += 1
        else:
            into.nameless.append(f"{what}: its gateway was up, and yet: {error}")
        return False
    except grpc.aio.AioRpcError as error:
        into.nameless.append(f"{what}: {error.code().name} {error.details()}")
        return False
    if answer != right:
        into.wrong.append(f"{what}: {answer!r}, undisturbed it is {right!r}")
        return False
    into.right += 1
    into.seconds.append(time.monotonic() - began)
    return True
