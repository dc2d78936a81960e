"""The public contract on a server that must not be asked: every call is refused with the way to the gateway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from baton.engine.types import Role
from baton.wire.status import code_number, failure_status, trailing_metadata
from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from baton.workerkit.convert import ORIGINS

Context = grpc.aio.ServicerContext[Any, Any]


class RefusingInference(inference_pb2_grpc.InferenceServicer):
    """`gateway_address` tells what the gateway that attached last calls itself; empty when none did."""

    def __init__(self, role: Role, gateway_address: Callable[[], str]) -> None:
        self._role = role
        self._gateway_address = gateway_address

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802 # a coroutine will do
        await self._refuse(context)

    async def Chat(self, request: inference_pb2.ChatRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802 # a coroutine will do
        await self._refuse(context)

    async def ListModels(self, request: inference_pb2.ListModelsRequest, context: Context) -> NoReturn:  # noqa: N802
        await self._refuse(context)

    async def _refuse(self, context: Context) -> NoReturn:
        address = self._gateway_address()
        where = f"send it to the gateway at {address}" if address else "send it to the gateway (none has attached to this server yet)"
        message = (
            f"this is a {self._role.value} server: it takes requests only with a room that the gateway drew and leads through the fleet; {where}"
        )
        origin = ORIGINS["decode" if self._role is Role.PLAIN else self._role.value]
        code = grpc.StatusCode.FAILED_PRECONDITION
        failure = common_pb2.Failure(code=code_number(code), origin=origin, cause="direct_request", message=message)
        await context.abort(code, message, trailing_metadata(failure_status(failure)))
        raise AssertionError("abort returns never")
