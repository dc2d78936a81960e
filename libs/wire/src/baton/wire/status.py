"""The one table between Baton's Failure and a gRPC status, in both directions.

A status that leaves a service carries google.rpc details: ErrorInfo (any client reads it), the Failure itself, and for a caller's mistake
BadRequest with the field at fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from baton.wire.v1 import common_pb2

#: The trailing metadata key under which gRPC's libraries look for google.rpc.Status.
DETAILS_KEY = "grpc-status-details-bin"

#: `ErrorInfo.domain` of everything that Baton itself says.
ERROR_DOMAIN = "baton"

#: Causes of failures that say what in a client's own text is at fault, or what of its answer.
_QUOTING = ("grammar_invalid", "grammar_fault")

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

_ORIGIN_NAMES: dict[int, str] = {number: name.removeprefix("ORIGIN_").lower() for name, number in common_pb2.Origin.items()}
_STAGE_NAMES: dict[int, str] = {number: name.removeprefix("ROOM_STATE_") for name, number in common_pb2.RoomState.items()}


def status_code(number: int) -> grpc.StatusCode:
    """The status of a `Failure.code`; UNKNOWN for a number that gRPC has not."""
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def code_number(code: grpc.StatusCode) -> int:
    """What goes into `Failure.code`."""
    number: int = code.value[0]
    return number


def origin_name(origin: int) -> str:
    """An author's name: "client", "gateway", "prefill", "decode", "transfer"; "unspecified" for a number that is none of them."""
    return _ORIGIN_NAMES.get(origin, "unspecified")


def stage_name(stage: int) -> str:
    """A state's name: "BOOTSTRAPPING", "WAITING", ...; "UNSPECIFIED" for a number that is none of them."""
    return _STAGE_NAMES.get(stage, "UNSPECIFIED")


def failure_message(failure: common_pb2.Failure) -> str:
    """The failure in one line: who ended it, in which stage, why, and the times."""
    origin, stage = origin_name(failure.origin), f" in {stage_name(failure.stage)}" if failure.stage else ""
    times = f" after {failure.elapsed_ms} ms" if failure.elapsed_ms else ""
    times += f" of {failure.allowed_ms} ms allowed" if failure.allowed_ms else ""
    return f"{failure.message} [{failure.cause}: ended by {origin}{stage}{times}]"


def log_reason(cause: str, message: str) -> str:
    """A failure's message as logs and traces may have it: what is wrong with a grammar or schema is said in words that quote it."""
    return "its client was told why, in words that quote the request" if cause in _QUOTING else message


def failure_status(failure: common_pb2.Failure, violations: Sequence[tuple[str, str]] = ()) -> status_pb2.Status:
    """The status that a failed request ends with. `violations`: (field, what is wrong with it), for a caller's mistake."""
    info = error_details_pb2.ErrorInfo(
        reason=failure.cause.upper(),
        domain=ERROR_DOMAIN,
        metadata={
            "origin": origin_name(failure.origin),
            "stage": stage_name(failure.stage),
            "elapsed_ms": str(failure.elapsed_ms),
            "allowed_ms": str(failure.allowed_ms),
        },
    )
    bad = [error_details_pb2.BadRequest.FieldViolation(field=field, description=text) for field, text in violations]
    details = [_pack(info), _pack(failure)]
    if bad:
        details.append(_pack(error_details_pb2.BadRequest(field_violations=bad)))
    message = failure.message if violations else failure_message(failure)
    return status_pb2.Status(code=failure.code, message=message, details=details)


def trailing_metadata(status: status_pb2.Status) -> tuple[tuple[str, bytes]]:
    """What carries `status` to the client: pass it to `context.abort` together with `status_code(status.code)` and `status.message`."""
    return ((DETAILS_KEY, status.SerializeToString()),)


def failure_from_error(error: grpc.RpcError, *, origin: common_pb2.Origin.ValueType, cause: str) -> common_pb2.Failure:
    """The failure that a failed call stands for: the one in its details, else its bare status, charged to `origin` for `cause`."""
    for packed in _details(error):
        failure = common_pb2.Failure()
        if packed.Is(common_pb2.Failure.DESCRIPTOR) and packed.Unpack(failure):
            return failure
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    text = error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else str(error)
    return common_pb2.Failure(code=code_number(code), origin=origin, cause=cause, message=text or code.name)


def field_violations(error: grpc.RpcError) -> list[tuple[str, str]]:
    """(field, what is wrong with it) of a refused call; empty when it carries none."""
    found = []
    for packed in _details(error):
        bad = error_details_pb2.BadRequest()
        if packed.Is(error_details_pb2.BadRequest.DESCRIPTOR) and packed.Unpack(bad):
            found += [(violation.field, violation.description) for violation in bad.field_violations]
    return found


def _details(error: grpc.RpcError) -> Sequence[any_pb2.Any]:
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            details: Sequence[any_pb2.Any] = status_pb2.Status.FromString(value).details
            return details
    return ()


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | common_pb2.Failure) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
