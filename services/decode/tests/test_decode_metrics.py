"""How leases that end are counted."""

from __future__ import annotations

from baton.decode.metrics import outcome_of
from baton.kvtransfer import LeaseState, LeaseTable
from baton.kvtransfer.lease import TRANSITIONS, LeaseEvent
from baton.servicekit.metrics.instruments import BY_NAME


def test_every_way_in_which_a_lease_can_end_has_a_name_in_the_table():
    ways = [way for way, after in TRANSITIONS.items() if after is LeaseState.FREE]
    outcomes = BY_NAME["baton.leases.ended"].labels["outcome"]
    assert {outcome_of(*way) for way in ways} == set(outcomes)


def test_the_table_counts_each_end_once():
    table = LeaseTable()
    landed, declined, lost = (table.reserve(room, "p", 1) for room in (1, 2, 3))
    for lease in (landed, declined, lost):
        table.publish(lease.room)
    table.landed(1, landed.generation)
    table.admit(1)
    table.release(1)
    table.quiesced(2, declined.generation)
    table.quiesced(2, declined.generation)
    table.overdue(3)
    table.fenced("p")
    assert dict(table.ended) == {
        (LeaseState.RUNNING, LeaseEvent.RELEASE): 1,
        (LeaseState.PUBLISHED, LeaseEvent.QUIESCED): 1,
        (LeaseState.QUARANTINED, LeaseEvent.FENCED): 1,
    }
    assert table.num_quarantined == 1
