"""What this package raises."""

from __future__ import annotations


class WorkerError(Exception):
    """Root of this package's exceptions."""


class HostStoppedError(WorkerError):
    """The engine's thread has ended: nothing can be submitted any more."""


class RefusedError(WorkerError):
    """A request that must not reach the engine. `code`: a gRPC status name; `cause`: a bounded word for metrics."""

    def __init__(self, code: str, cause: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.cause = cause
        self.message = message
