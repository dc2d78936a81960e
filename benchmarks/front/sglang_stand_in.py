"""The stand-in behind SGLang's public scheduler contract, so that the `smg` gateway can be driven with the same load. Needs smg-grpc-proto."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import common_pb2 as smg_common
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as sglang_grpc

CHUNK_BYTES = 1 << 20


class Scheduler(sglang_grpc.SglangSchedulerServicer):
    """What smg calls of a worker, and no more."""

    def __init__(self, answers: Any, folder: Path, vocab_size: int) -> None:
        self._answers = answers
        self._folder = folder
        self._vocab_size = vocab_size

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        return sglang.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        path = str(self._folder)
        return sglang.GetModelInfoResponse(
            model_path=path, tokenizer_path=path, is_generation=True, served_model_name="stand-in", max_context_length=1 << 20,
            vocab_size=self._vocab_size, model_type="llama", max_req_input_len=1 << 20,
        )  # fmt: skip

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        arguments = Struct()
        arguments.update({"model_path": str(self._folder), "served_model_name": "stand-in", "page_size": 16})
        return sglang.GetServerInfoResponse(server_args=arguments, server_type="grpc", max_total_num_tokens=1 << 24)

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        return sglang.GetLoadsResponse(dp_rank_count=1, loads=[sglang.SchedulerLoad(dp_rank=0)])

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._answers.drop(request.request_id)
        return sglang.AbortResponse(success=True)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for path in self._folder.glob("*.json"):
                archive.write(path, path.name)
        data = packed.getvalue()
        for start in range(0, len(data), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(data)
            yield smg_common.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=hashlib.sha256(data).hexdigest() if last else "")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        queue: asyncio.Queue[tuple[int, list[int], bool]] = asyncio.Queue()
        room, prompt_tokens = request.request_id, len(request.tokenized.input_ids)
        self._answers.take(room, request.sampling_params.max_new_tokens, lambda *part: queue.put_nowait(part))
        ids: list[int] = []
        try:
            is_last = False
            while not is_last:
                _, tokens, is_last = await queue.get()
                ids += tokens
                chunk = sglang.GenerateStreamChunk(token_ids=tokens, prompt_tokens=prompt_tokens, completion_tokens=len(ids))
                yield sglang.GenerateResponse(request_id=room, chunk=chunk)
            done = sglang.GenerateComplete(output_ids=ids, finish_reason="length", prompt_tokens=prompt_tokens, completion_tokens=len(ids))
            yield sglang.GenerateResponse(request_id=room, complete=done)
        finally:
            self._answers.drop(room)


def add_scheduler(server: grpc.aio.Server, answers: Any, folder: Path, vocab_size: int) -> None:
    sglang_grpc.add_SglangSchedulerServicer_to_server(Scheduler(answers, folder, vocab_size), server)
