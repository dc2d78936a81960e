"""What this service raises."""

from __future__ import annotations

from baton.engine.types import Failure


class PrefillError(Exception):
    """Root of this package's exceptions."""


class BadPublicationError(PrefillError):
    """A decode server published what cannot be written. `cause`: a bounded word for metrics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class TicketRefusedError(PrefillError):
    """A publication whose ticket is missing or wrong. `failure`: what its publisher is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
