"""What this package raises of its own. Requests that cannot be served are RefusedError, workerkit's."""

from __future__ import annotations


class SglangError(Exception):
    """Root of this package's exceptions."""


class ModelFilesError(SglangError):
    """A file of the model's folder that the contract's answers are made of is missing or cannot be read."""
