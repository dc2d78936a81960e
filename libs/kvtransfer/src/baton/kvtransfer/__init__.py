"""One-sided writes of KV pages into slots that the receiver preallocated."""

from __future__ import annotations

from baton.kvtransfer.base import Agent, Inbox, InboxStats, Peer, ProbePoint, Region, WriteHandle, WriteState
from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.digest import digest
from baton.kvtransfer.doorbell import STATUS_DECLINED, STATUS_OK, Doorbell
from baton.kvtransfer.errors import (
    Closed,
    DoorbellsExhausted,
    IncompatiblePeer,
    InvalidArgument,
    LibraryConflict,
    LibraryError,
    LibraryNotFound,
    LibraryTooOld,
    PeerError,
    PeerLost,
    PeerUnreachable,
    TransferError,
    UCXError,
    UnexpectedTransport,
)
from baton.kvtransfer.factory import open_agent
from baton.kvtransfer.lease import LeaseEvent, LeaseState
from baton.kvtransfer.lease_table import Lease, LeaseTable
from baton.kvtransfer.ranks import RankMemories, RankMemory, open_ranks
from baton.kvtransfer.routes import Route, route_spans, routes, routes_into
from baton.kvtransfer.spans import PoolLayout, SpanArray, merge, page_ids, spans_for

__all__ = [
    "STATUS_DECLINED",
    "STATUS_OK",
    "Agent",
    "AgentConfig",
    "Closed",
    "Doorbell",
    "DoorbellsExhausted",
    "Inbox",
    "InboxStats",
    "IncompatiblePeer",
    "InvalidArgument",
    "Lease",
    "LeaseEvent",
    "LeaseState",
    "LeaseTable",
    "LibraryConflict",
    "LibraryError",
    "LibraryNotFound",
    "LibraryTooOld",
    "Peer",
    "PeerError",
    "PeerLost",
    "PeerUnreachable",
    "PoolLayout",
    "ProbePoint",
    "RankMemories",
    "RankMemory",
    "Region",
    "Route",
    "SpanArray",
    "TransferError",
    "UCXError",
    "UnexpectedTransport",
    "WriteHandle",
    "WriteState",
    "digest",
    "merge",
    "open_agent",
    "open_ranks",
    "page_ids",
    "route_spans",
    "routes",
    "routes_into",
    "spans_for",
]
