"""The one table from the gateway's errors to HTTP: status codes, and bodies as OpenAI's clients read them."""

from __future__ import annotations

import json
from typing import Any

import grpc
from starlette.responses import Response

from baton.gateway.errors import BodyTimeoutError, BodyTooLargeError, GatewayError
from baton.gateway.http.last import LastAnswer
from baton.gateway.withheld import told_text
from baton.wire.status import origin_name, stage_name, status_code
from baton.wire.v1 import common_pb2

_STATUS: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


#: Of a server's failure too: they say what the client may do, not what it did wrong.
_NOT_BLAMING = (429, 499, 501)

_INSIDE = (common_pb2.ORIGIN_PREFILL, common_pb2.ORIGIN_DECODE, common_pb2.ORIGIN_TRANSFER)

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def status_of(error: GatewayError) -> int:
    """500 for what has no better one, and for a server's refusal of another server: the client did nothing wrong."""
    if isinstance(error, BodyTooLargeError):
        return 413
    if isinstance(error, BodyTimeoutError):
        return 408
    failure = error.failure()
    status = _STATUS.get(status_code(failure.code), 500)
    blames_client = status < 500 and status not in _NOT_BLAMING
    return 500 if blames_client and failure.origin in _INSIDE else status


def error_body(error: GatewayError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}; for a room that failed also who ended it, and where."""
    status = status_of(error)
    fields = [field for field, _ in error.violations()]
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    body: dict[str, Any] = {"message": told_text(error), "type": kind, "param": fields[0] if fields else None, "code": error.cause}
    failure = error.failure()
    if failure.stage:
        body |= {"origin": origin_name(failure.origin), "stage": stage_name(failure.stage), "elapsed_ms": failure.elapsed_ms}
    if failure.allowed_ms:
        body["allowed_ms"] = failure.allowed_ms
    return {"error": body}


def error_response(error: GatewayError) -> Response:
    status = status_of(error)
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="baton"'
    if status not in (408, 413):
        return json_response(error_body(error), status, headers)
    headers["connection"] = "close"  # what is left of a body that was not read to its end is not the next request
    return LastAnswer(dump(error_body(error)), status, headers, media_type="application/json")


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(body), status, headers, media_type="application/json")


def dump(body: Any) -> bytes:
    """Compact UTF-8."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
