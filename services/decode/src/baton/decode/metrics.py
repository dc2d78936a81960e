"""What the importer and the sessions with prefill servers count anyway, as metrics."""

from __future__ import annotations

from baton.decode.importer import Importer
from baton.decode.peers import PeerSet
from baton.kvtransfer import LeaseState
from baton.kvtransfer.lease import LeaseEvent
from baton.servicekit import Metrics
from baton.servicekit.metrics import Values, transport_label

_BY_EVENT = {LeaseEvent.QUIESCED: "quiesced", LeaseEvent.FENCED: "fenced"}
_BY_BOTH = {
    (LeaseState.RUNNING, LeaseEvent.RELEASE): "landed",
    (LeaseState.LANDED, LeaseEvent.RELEASE): "rejected",
    (LeaseState.RESERVED, LeaseEvent.ABORT): "unpublished",
    (LeaseState.RESERVED, LeaseEvent.RELEASE): "unpublished",
    (LeaseState.LANDED, LeaseEvent.ABORT): "aborted",
    (LeaseState.RUNNING, LeaseEvent.ABORT): "aborted",
    (LeaseState.ABORTING, LeaseEvent.LANDED): "late",
    (LeaseState.QUARANTINED, LeaseEvent.LANDED): "late",
}
_REASONS = {"room/unknown": "unknown", "room/ended": "ended", "generation/stale": "stale"}


def observe_importer(metrics: Metrics, importer: Importer, peers: PeerSet) -> None:
    """On the exporter's thread: copies of counts, no lock of the importer's."""
    leases, counters = importer.leases, importer.counters
    metrics.observe("baton.leases.ended", lambda: [(count, {"outcome": outcome_of(*how)}) for how, count in list(leases.ended.items())])
    metrics.observe_one("baton.leases.quarantined", lambda: leases.num_quarantined)
    metrics.observe(
        "baton.leases.ignored", lambda: [(count, {"reason": _REASONS.get(what, "out_of_order")}) for what, count in list(leases.ignored.items())]
    )
    importer.on_digest(metrics.recorder("baton.digest.wait").record)
    metrics.observe_one("baton.doorbells.stale", lambda: counters["doorbell_stale"])
    metrics.observe_one("baton.revokes.overdue", lambda: counters["revoke_overdue"])
    metrics.observe("baton.peers", lambda: _peers(peers))
    metrics.observe("baton.peer.speed", lambda: _speeds(peers))


def outcome_of(before: LeaseState, event: LeaseEvent) -> str:
    """How a lease that became FREE is counted."""
    return _BY_EVENT.get(event) or _BY_BOTH[before, event]


def _peers(peers: PeerSet) -> Values:
    states = peers.states()
    connected = sum(bool(state.prefill_instance_id) for state in states)
    return [(connected, {"state": "connected"}), (len(states) - connected, {"state": "problem"})]


def _speeds(peers: PeerSet) -> Values:
    return [
        (state.gigabytes_per_s * 1e9, {"peer": state.prefill_instance_id, "transport": transport_label(state.transport)})
        for state in peers.states()
        if state.prefill_instance_id
    ]
