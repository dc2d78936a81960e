"""The table between failures and statuses: there and back over a real server, and what a stranger's client can read."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.wire.status import (
    code_number,
    failure_from_error,
    failure_message,
    failure_status,
    field_violations,
    origin_name,
    stage_name,
    status_code,
    trailing_metadata,
)
from baton.wire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

FAILURE = common_pb2.Failure(
    code=code_number(grpc.StatusCode.UNAVAILABLE),
    origin=common_pb2.ORIGIN_PREFILL,
    stage=common_pb2.ROOM_STATE_TRANSFERRING,
    cause="prefill_lost",
    message="prefill server 10.0.0.1:50061 is gone",
    elapsed_ms=17,
    allowed_ms=300_000,
)


class Refusing(inference_pb2_grpc.InferenceServicer):
    def __init__(self, failure: common_pb2.Failure | None, violations: list[tuple[str, str]]) -> None:
        self._failure, self._violations = failure, violations

    async def ListModels(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
        if self._failure is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "bare")
        status = failure_status(self._failure, self._violations)
        await context.abort(status_code(status.code), status.message, trailing_metadata(status))


async def refused(failure: common_pb2.Failure | None, violations: list[tuple[str, str]] | None = None) -> grpc.aio.AioRpcError:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Refusing(failure, violations or []), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=10)
    finally:
        await server.stop(0)
    return caught.value


@pytest.fixture
async def error() -> grpc.aio.AioRpcError:
    return await refused(FAILURE)


async def test_a_failure_crosses_the_wire_whole(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert failure_from_error(error, origin=common_pb2.ORIGIN_GATEWAY, cause="other") == FAILURE


async def test_the_message_names_author_stage_and_times(error: grpc.aio.AioRpcError) -> None:
    text = error.details() or ""
    for part in ("10.0.0.1:50061 is gone", "prefill_lost", "ended by prefill in TRANSFERRING", "17 ms of 300000 ms"):
        assert part in text


def test_a_message_without_a_stage_names_none() -> None:
    failure = common_pb2.Failure(origin=common_pb2.ORIGIN_CLIENT, cause="malformed_body", message="not JSON")
    assert failure_message(failure) == "not JSON [malformed_body: ended by client]"


async def test_grpcs_own_library_reads_the_details(error: grpc.aio.AioRpcError) -> None:
    status = library_reads(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["origin"], info.metadata["stage"]) == ("PREFILL_LOST", "baton", "prefill", "TRANSFERRING")


def library_reads(error: grpc.aio.AioRpcError) -> Any:
    return rpc_status.from_call(error)


async def test_a_callers_mistake_names_its_field() -> None:
    failure = common_pb2.Failure(code=code_number(grpc.StatusCode.INVALID_ARGUMENT), cause="out_of_range", message="max_tokens=0 is below 1")
    error = await refused(failure, [("max_tokens", "max_tokens=0 is below 1")])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "max_tokens=0 is below 1"
    assert field_violations(error) == [("max_tokens", "max_tokens=0 is below 1")]


async def test_a_bare_status_is_charged_to_whom_the_caller_says() -> None:
    error = await refused(None)
    failure = failure_from_error(error, origin=common_pb2.ORIGIN_DECODE, cause="session_refused")
    assert (failure.code, failure.origin, failure.cause, failure.message) == (5, common_pb2.ORIGIN_DECODE, "session_refused", "bare")
    assert field_violations(error) == []


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_code_goes_there_and_back(code: grpc.StatusCode) -> None:
    assert status_code(code_number(code)) is code


def test_strange_numbers_are_named_not_raised() -> None:
    assert status_code(99) is grpc.StatusCode.UNKNOWN
    assert origin_name(99) == "unspecified"
    assert stage_name(99) == "UNSPECIFIED"
    assert origin_name(common_pb2.ORIGIN_TRANSFER) == "transfer"
    assert stage_name(common_pb2.ROOM_STATE_WAITING) == "WAITING"
