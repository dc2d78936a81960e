"""What this service raises."""

from __future__ import annotations


class PrefillError(Exception):
    """Root of this package's exceptions."""


class BadPublicationError(PrefillError):
    """A decode server published what cannot be written. `cause`: a bounded word for metrics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause
