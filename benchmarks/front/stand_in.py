"""A server that answers at once and costs next to nothing: what is left of a measurement through a gateway is the gateway.

    python benchmarks/front/stand_in.py MODEL_FOLDER --step-ms 50 --tokens-a-step 1

The first token of a room goes out when the room is taken, then so many a step for all rooms alike, until max_tokens. It speaks three contracts
on one port, printed as JSON when it serves: `baton.v1.Worker` (a plain server, one report a step for all rooms), `baton.v1.Inference` (the same
answer to a client without any gateway: the floor), and, where smg-grpc-proto is installed, SGLang's scheduler contract.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop
from tokenizers import Tokenizer

from baton.wire.channel import SERVER_OPTIONS
from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

TEXT = "The relay runner hands the baton over without slowing down, and the next one is already at full speed when it comes. "


class Answers:
    """Rooms that are being answered. A room's `sink(first, tokens, is_last)` gets its tokens, from the event loop, as they are due."""

    def __init__(self, tokens: list[int], step_s: float, tokens_a_step: int) -> None:
        self._tokens = tokens
        self._step_s = step_s
        self._tokens_a_step = tokens_a_step
        self._rooms: dict[Any, tuple[Any, int, int]] = {}
        self.on_step = lambda: None

    def take(self, room: Any, wanted: int, sink: Any) -> None:
        sink(0, self._tokens[:1], wanted == 1)
        if wanted > 1:
            self._rooms[room] = (sink, 1, wanted)

    def drop(self, room: Any) -> None:
        self._rooms.pop(room, None)

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._step_s, time.monotonic() - self._step_s)
            await asyncio.sleep(due - time.monotonic())
            for room, (sink, sent, wanted) in list(self._rooms.items()):
                end = min(sent + self._tokens_a_step, wanted)
                sink(sent, [self._tokens[index % len(self._tokens)] for index in range(sent, end)], end == wanted)
                if end == wanted:
                    del self._rooms[room]
                else:
                    self._rooms[room] = (sink, end, wanted)
            self.on_step()


class Worker(worker_pb2_grpc.WorkerServicer):
    """One session at a time, as a plain server."""

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._report = worker_pb2.Report()
        self._reports: asyncio.Queue[worker_pb2.Report] = asyncio.Queue()
        self._loaded_at = 0.0
        answers.on_step = self._flush

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.WorkerInfo:  # noqa: N802
        return worker_pb2.WorkerInfo(
            instance_id="stand-in", role=common_pb2.ROLE_PLAIN, model="stand-in", vocab_size=self._vocab_size, max_model_len=1 << 20,
            fingerprint=common_pb2.KVFingerprint(protocol_version=1, model="stand-in", page_size=16), load=self._load(),
        )  # fmt: skip

    async def Session(self, request_iterator: AsyncIterator[worker_pb2.Command], context: Any) -> AsyncIterator[worker_pb2.Report]:  # noqa: N802
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield worker_pb2.Report(load=self._load())
            while True:
                yield await self._reports.get()
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[worker_pb2.Command]) -> None:
        async for command in commands:
            if command.HasField("start"):
                room = command.start.room
                self._report.events.append(worker_pb2.RoomEvent(room=room, prefill_started=worker_pb2.PrefillStarted()))
                self._answers.take(room, command.start.sampling.max_tokens, self._sink(room))
                self._flush()
            elif command.HasField("abort"):
                self._answers.drop(command.abort.room)

    def _sink(self, room: int) -> Any:
        def sink(first: int, tokens: list[int], is_last: bool) -> None:
            report = self._report
            report.rooms.extend([room] * len(tokens))
            report.indexes.extend(range(first, first + len(tokens)))
            report.tokens.extend(tokens)
            if is_last:
                over = worker_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=first + len(tokens))
                report.events.append(worker_pb2.RoomEvent(room=room, finished=over))

        return sink

    def _flush(self) -> None:
        if self._loaded_at + 1 < time.monotonic():
            self._report.load.CopyFrom(self._load())
            self._loaded_at = time.monotonic()
        elif not self._report.rooms and not self._report.events:
            return
        self._reports.put_nowait(self._report)
        self._report = worker_pb2.Report()

    @staticmethod
    def _load() -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(total_pages=1 << 20, free_pages=1 << 20)


class Direct(inference_pb2_grpc.InferenceServicer):
    """The same answers as text, with nothing in between."""

    def __init__(self, answers: Answers, tokenizer: Tokenizer) -> None:
        self._answers = answers
        self._tokenizer = tokenizer

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:  # noqa: N802
        queue: asyncio.Queue[tuple[int, list[int], bool]] = asyncio.Queue()
        room = object()
        self._answers.take(room, request.sampling.max_tokens, lambda *part: queue.put_nowait(part))
        try:
            is_last = False
            while not is_last:
                first, tokens, is_last = await queue.get()
                yield inference_pb2.GenerateResponse(text=self._tokenizer.decode(tokens), token_ids=tokens)
            usage = inference_pb2.Usage(prompt_tokens=1, completion_tokens=first + len(tokens))
            yield inference_pb2.GenerateResponse(finish_reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
        finally:
            self._answers.drop(room)


async def serve(given: argparse.Namespace) -> None:
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    answers = Answers(tokenizer.encode(TEXT, add_special_tokens=False).ids, given.step_ms / 1e3, given.tokens_a_step)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(Worker(answers, tokenizer.get_vocab_size()), server)
    inference_pb2_grpc.add_InferenceServicer_to_server(Direct(answers, tokenizer), server)
    with contextlib.suppress(ImportError):
        from sglang_stand_in import add_scheduler

        add_scheduler(server, answers, given.model, tokenizer.get_vocab_size())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await answers.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--tokens-a-step", type=int, default=1)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
