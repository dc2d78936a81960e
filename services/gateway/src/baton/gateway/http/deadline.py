"""A client's deadline over HTTP, where gRPC has its own."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from baton.gateway.errors import OutOfRangeError

#: There is no standard header: this one says its unit, as Connect's Connect-Timeout-Ms does.
TIMEOUT_HEADER = "X-Request-Timeout-Ms"
MAX_TIMEOUT_MS = 9_999_999_999

_SHOWN_CHARS = 40


def deadline_of(headers: Headers, accepted_at: float) -> float | None:
    """When the client gives up, on the clock of `accepted_at` (seconds); None: it did not say. Raises OutOfRangeError."""
    given = headers.getlist(TIMEOUT_HEADER)
    if not given:
        return None
    allowed = f"one whole number of milliseconds in [1, {MAX_TIMEOUT_MS}]"
    if len(given) > 1:
        raise OutOfRangeError(TIMEOUT_HEADER, repr(given)[:_SHOWN_CHARS], allowed, "send it once")
    if not re.fullmatch(r"[0-9]{1,10}", given[0]) or int(given[0]) == 0:
        raise OutOfRangeError(TIMEOUT_HEADER, repr(given[0])[:_SHOWN_CHARS], allowed)
    return accepted_at + int(given[0]) / 1e3
