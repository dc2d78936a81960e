"""Everything this package raises.

TransferError
├── InvalidArgument        the caller's mistake: names the field, the value, the limit
├── DoorbellsExhausted     more rooms in flight than the inbox has doorbells
├── Closed                 the object was closed (or fenced) before
├── PeerError              the other process, or the way to it
│   ├── IncompatiblePeer   it speaks another version, or holds another kind of pool
│   │   └── UnexpectedTransport   the path is not the one that was demanded
│   ├── PeerUnreachable    it could not be reached within the time allowed
│   └── PeerLost           it was reached once and is gone
├── UCXError               a UCX function failed for another reason
└── LibraryError           no usable libucp
    ├── LibraryNotFound
    ├── LibraryTooOld
    └── LibraryConflict    another build of UCX is loaded already
"""

# ruff: noqa: N818  (the tree tells what is an error: "except Closed" and "except PeerLost" read as they are meant)

from __future__ import annotations


class TransferError(Exception):
    """Base of all errors of this package."""


class InvalidArgument(TransferError, ValueError):
    """The caller's mistake; nothing was done."""


class DoorbellsExhausted(TransferError):
    """Every doorbell of the inbox is armed."""


class Closed(TransferError):
    """The object was closed (or fenced) before this call."""


class PeerError(TransferError):
    """The other process, or the way to it, is at fault."""


class IncompatiblePeer(PeerError):
    """The two sides must not exchange pages; both values are in the message."""


class UnexpectedTransport(IncompatiblePeer):
    """UCX chose a path that is not the one that `expected_transport` demands."""


class PeerUnreachable(PeerError):
    """No connection within the time allowed."""


class PeerLost(PeerError):
    """The peer was connected and is gone; its writes may be incomplete."""


class UCXError(TransferError):
    """A UCX function failed.

    function: its name. status: UCX's number (negative). reason: what UCX calls it.
    """

    def __init__(self, function: str, status: int, reason: str) -> None:
        super().__init__(f"{function} failed: {reason} ({status})")
        self.function = function
        self.status = status
        self.reason = reason


class LibraryError(TransferError):
    """No usable libucp."""


class LibraryNotFound(LibraryError):
    """No libucp could be opened; the message lists the places that were tried."""


class LibraryTooOld(LibraryError):
    """The libucp that was found lacks a function that is called here."""


class LibraryConflict(LibraryError):
    """Another build of UCX is already loaded in this process; two of them crash each other."""
