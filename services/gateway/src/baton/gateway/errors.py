"""What goes wrong in the gateway: the caller's mistakes, what the gateway cannot take now, and rooms that failed.

Every error is a `Failure` on the way out: `failure()` fills it, `baton.wire.status` makes a gRPC status of it and `http/errors.py` an HTTP one.
"""

from __future__ import annotations

import grpc

from baton.wire.status import code_number, failure_message, status_code
from baton.wire.v1 import common_pb2

#: Of a message, UTF-8. What a client sent is part of it, and it travels three times in gRPC's trailers, which hold 8 KiB.
MAX_MESSAGE_BYTES = 1000

#: What overload and the lack of servers have in common: they pass.
_PASSING = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)

#: Seconds after which an overloaded or unready gateway may be asked again.
RETRY_AFTER_S = 1


class GatewayError(Exception):
    """Root of this package's exceptions. `cause`: a bounded word for metrics.

    The message can be sent and logged whatever the client wrote: without lone surrogates, and of at most MAX_MESSAGE_BYTES bytes.
    """

    code = grpc.StatusCode.INTERNAL
    cause = "internal"
    origin = common_pb2.ORIGIN_GATEWAY

    def __init__(self, message: str) -> None:
        super().__init__(sendable(message))

    def failure(self) -> common_pb2.Failure:
        return common_pb2.Failure(code=code_number(self.code), origin=self.origin, cause=self.cause, message=str(self))

    def violations(self) -> list[tuple[str, str]]:
        """(field, what is wrong with it); empty when no field is at fault."""
        return []

    @property
    def for_log(self) -> str:
        """The message, but for what a client wrote."""
        return str(self)

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the same request may be sent again; None when that would not help."""
        failure = self.failure()
        again = failure.origin != common_pb2.ORIGIN_CLIENT and status_code(failure.code) in _PASSING
        return RETRY_AFTER_S if again else None


class ModelFolderError(GatewayError):
    """The operator's mistake: the model folder lacks a file or holds one that cannot be read."""

    cause = "model_folder"


class WorkerProtocolError(GatewayError):
    """A worker broke the contract, or is not the one that was named on the command line."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    cause = "worker_protocol"


# --- the caller's mistakes: nothing was reserved -----------------------------------------------------------------------------------


class RequestError(GatewayError):
    """A request that is refused as it stands. `field` is where, in the request's own words; `quotes`: the message may have a part of the request in
    it, which may be of a prompt."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    cause = "invalid_request"
    origin = common_pb2.ORIGIN_CLIENT
    quotes = True

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = sendable(field)

    def violations(self) -> list[tuple[str, str]]:
        return [(self.field, str(self))] if self.field else []

    @property
    def for_log(self) -> str:
        return f"{self.field or 'the body'} is refused; its client was told why, in words that quote it" if self.quotes else str(self)


class MalformedBodyError(RequestError):
    """Not JSON, not an object, or not the message that was expected."""

    cause = "malformed_body"
    quotes = False


class BodyEncodingError(RequestError):
    """Bytes that are not UTF-8."""

    cause = "body_not_utf8"
    quotes = False


class BodyTooLargeError(RequestError):
    cause = "body_too_large"
    quotes = False

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__("", f"the body has {num_bytes} bytes or more, the limit is {limit_bytes}: shorten it, or raise --max-body-bytes")


class TooManyValuesError(BodyTooLargeError):
    """Taking it apart would keep others waiting."""

    def __init__(self, field: str, found: str, limit: int) -> None:
        RequestError.__init__(self, field, f"{field or 'the body'} has {found}, the limit is {limit}: send fewer")


class SurrogateError(RequestError):
    """Half of a UTF-16 pair, which only JSON's escapes can spell."""

    def __init__(self, field: str, text: str) -> None:
        lone = next(char for char in text if "\ud800" <= char <= "\udfff")
        super().__init__(field, f"{field or 'the body'} has the lone surrogate \\u{ord(lone):04x}: it is not Unicode text")


class BodyTimeoutError(RequestError):
    """A body that comes too slowly."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    cause = "body_late"
    quotes = False

    def __init__(self, limit_s: float) -> None:
        super().__init__("", f"the body was not complete within {limit_s:g} s (--http-body-timeout-s): send it faster, or raise the limit")


class MissingFieldError(RequestError):
    cause = "missing_field"
    quotes = False


class WrongTypeError(RequestError):
    cause = "wrong_type"


class OutOfRangeError(RequestError):
    """A number outside its range."""

    cause = "out_of_range"
    quotes = False

    def __init__(self, field: str, value: object, allowed: str, remedy: str = "") -> None:
        super().__init__(field, f"{field}={value} is outside {allowed}{': ' + remedy if remedy else ''}")


class UnsupportedError(RequestError):
    """Something that other servers do and this one does not; never ignored silently."""

    cause = "unsupported"


class StopListError(RequestError):
    cause = "stop_list"
    quotes = False


class StructuredOutputError(RequestError):
    """A schema, expression or grammar that cannot be made into one."""

    cause = "structured_output"


class EmptyPromptError(RequestError):
    cause = "prompt_empty"
    quotes = False


class PromptTooLongError(RequestError):
    cause = "prompt_too_long"
    quotes = False


class RenderedTooLongError(GatewayError):
    """A conversation that a chat template made too long a text of. Of this package's inside: who has it rendered knows the field and the limit."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(f"the chat template made {num_chars} characters and more")
        self.num_chars = num_chars


class ChatTemplateError(RequestError):
    """The model's chat template does not take these messages."""

    cause = "chat_template"


class UnknownModelError(RequestError):
    code = grpc.StatusCode.NOT_FOUND
    cause = "model_not_found"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__("model", f"model={asked!r} is not served here; this gateway serves {served!r}")


# --- the gateway cannot take it now ------------------------------------------------------------------------------------------------


class NotReadyError(GatewayError):
    """No usable pair of servers and no plain one."""

    code = grpc.StatusCode.UNAVAILABLE
    cause = "no_route"


class DrainingError(GatewayError):
    code = grpc.StatusCode.UNAVAILABLE
    cause = "gateway_draining"

    def __init__(self) -> None:
        super().__init__("this gateway is stopping and takes no new requests: send it to another one")


class UnauthenticatedError(GatewayError):
    """No API key, or none that this gateway knows. The message never holds what was shown."""

    code = grpc.StatusCode.UNAUTHENTICATED
    origin = common_pb2.ORIGIN_CLIENT

    def __init__(self, message: str, cause: str = "key_unknown") -> None:
        super().__init__(message)
        self.cause = cause


class ForbiddenError(GatewayError):
    """A key that opens something else."""

    code = grpc.StatusCode.PERMISSION_DENIED
    cause = "key_role"
    origin = common_pb2.ORIGIN_CLIENT


class OverloadedError(GatewayError):
    """More than this gateway, its queue, or a worker's queue of starts, holds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    cause = "overloaded"

    def __init__(self, message: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s

    @property
    def retry_after_s(self) -> int:
        return self._retry_after_s


class QueueTimeoutError(OverloadedError):
    """It waited for a place as long as a request may."""

    cause = "queue_timeout"


class QueueDeadlineError(GatewayError):
    """Its own deadline passed while it waited for a place."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    cause = "queue_deadline"


class KeyLimitError(OverloadedError):
    """An API key has as much as it may have."""

    origin = common_pb2.ORIGIN_CLIENT

    def __init__(self, cause: str, message: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message, retry_after_s)
        self.cause = cause


# --- an operator asks for what cannot be ------------------------------------------------------------------------------------------


class UnknownServerError(GatewayError):
    """No server of that name is in the fleet."""

    code = grpc.StatusCode.NOT_FOUND
    cause = "server_not_found"
    origin = common_pb2.ORIGIN_CLIENT


class NotConnectedError(GatewayError):
    """The server is in the fleet and cannot be told anything now."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    cause = "server_not_connected"


# --- a room ended badly ------------------------------------------------------------------------------------------------------------


class RoomFailedError(GatewayError):
    """A request that was accepted and did not end well: who ended it, at which stage, why. `field`: of the request, where that is to blame."""

    def __init__(self, failure: common_pb2.Failure, field: str = "") -> None:
        super().__init__(failure_message(failure))
        self._failure = failure
        self.cause = failure.cause
        self.field = field

    def failure(self) -> common_pb2.Failure:
        return self._failure

    def violations(self) -> list[tuple[str, str]]:
        return [(self.field, self._failure.message)] if self.field else []


def sendable(text: str) -> str:
    """As a message may be. What is too long is cut in its middle: the field is named at the beginning, limit and remedy at the end."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) > MAX_MESSAGE_BYTES:
        kept = MAX_MESSAGE_BYTES // 2 - 20
        raw = raw[:kept] + b"... (%d bytes) ..." % len(raw) + raw[-kept:]
    return raw.decode("utf-8", "ignore")
