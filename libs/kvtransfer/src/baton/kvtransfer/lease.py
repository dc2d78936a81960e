"""Who owns a receiver's page: the lease of one room, as a table.

    FREE -> RESERVED -> PUBLISHED -> LANDED -> RUNNING -> FREE
                            |  (cancel, timeout)
                            v
                        ABORTING -> QUARANTINED -> FREE

A one-sided write cannot be called back. Pages that were published are freed only on proof that nobody writes into them any more, and there are
three proofs: the writer's doorbell (it is its last write), the writer's word that it is quiesced, and the fence (its way in is destroyed, or its
process is gone). No timer is among them: a timer may only move a lease to QUARANTINED, which says that the proof is overdue.
"""

from __future__ import annotations

import enum


class LeaseState(enum.Enum):
    FREE = "free"
    RESERVED = "reserved"
    PUBLISHED = "published"
    LANDED = "landed"
    RUNNING = "running"
    ABORTING = "aborting"
    QUARANTINED = "quarantined"


class LeaseEvent(enum.Enum):
    """What can happen to a lease, and who says so."""

    PUBLISH = "publish"  # us: the destination is told to the writer
    LANDED = "landed"  # the writer's doorbell, status OK
    ADMIT = "admit"  # us: the engine took the pages over
    RELEASE = "release"  # us: the engine (or a reservation never published) gives them back
    ABORT = "abort"  # us: cancel or timeout; Revoke goes to the writer
    QUIESCED = "quiesced"  # the writer: stopped and flushed (also a doorbell with another status, and Declined)
    OVERDUE = "overdue"  # us: the writer is lost, or did not answer the Revoke in time
    FENCED = "fenced"  # us: proof that the writer can reach us no more


_S = LeaseState
_E = LeaseEvent

#: Where an event leads. What is not listed is ignored and counted: it came twice, late or out of order.
TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (_S.RESERVED, _E.PUBLISH): _S.PUBLISHED,
    (_S.RESERVED, _E.RELEASE): _S.FREE,
    (_S.RESERVED, _E.ABORT): _S.FREE,
    (_S.PUBLISHED, _E.LANDED): _S.LANDED,
    (_S.PUBLISHED, _E.ABORT): _S.ABORTING,
    (_S.PUBLISHED, _E.OVERDUE): _S.QUARANTINED,
    (_S.PUBLISHED, _E.QUIESCED): _S.FREE,
    (_S.PUBLISHED, _E.FENCED): _S.FREE,
    (_S.LANDED, _E.ADMIT): _S.RUNNING,
    (_S.LANDED, _E.ABORT): _S.FREE,
    (_S.LANDED, _E.RELEASE): _S.FREE,
    (_S.RUNNING, _E.RELEASE): _S.FREE,
    (_S.RUNNING, _E.ABORT): _S.FREE,
    (_S.ABORTING, _E.OVERDUE): _S.QUARANTINED,
    (_S.ABORTING, _E.LANDED): _S.FREE,
    (_S.ABORTING, _E.QUIESCED): _S.FREE,
    (_S.ABORTING, _E.FENCED): _S.FREE,
    (_S.QUARANTINED, _E.LANDED): _S.FREE,
    (_S.QUARANTINED, _E.QUIESCED): _S.FREE,
    (_S.QUARANTINED, _E.FENCED): _S.FREE,
}

#: States in which the writer may still be writing into the pages.
WRITABLE = frozenset({_S.PUBLISHED, _S.ABORTING, _S.QUARANTINED})


def after(state: LeaseState, event: LeaseEvent) -> LeaseState | None:
    """The next state, or None when the event does not apply in `state`."""
    return TRANSITIONS.get((state, event))
