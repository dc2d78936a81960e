"""What this service raises."""

from __future__ import annotations


class DecodeError(Exception):
    """Root of this package's exceptions."""


class PairRefusedError(DecodeError):
    """A prefill server and this one must not exchange pages: their fingerprints, or the path between them."""


class SessionEndedError(DecodeError):
    """The prefill server closed the session, or spoke out of turn."""


class WayLostError(SessionEndedError):
    """Both servers are there, and what pages went over between them broke."""
