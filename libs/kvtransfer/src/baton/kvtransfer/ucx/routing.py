"""Which way to a receiver, and whether it may be gone at all: decided from its invitation before anything is opened."""

from __future__ import annotations

import os

from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.doorbell import RECORD_BYTES
from baton.kvtransfer.errors import IncompatiblePeer, InvalidArgument, PeerUnreachable
from baton.kvtransfer.identity import Identity, is_gone
from baton.kvtransfer.invitation import Invitation, require_same
from baton.kvtransfer.ucx import options

MAX_DOORBELLS = 1 << 20
#: The table's header, the bell, every doorbell: one line each, and aligned as such.
_LINE_BYTES = 64


def path_to(invited: Invitation, config: AgentConfig, here: Identity) -> str:
    """options.SHM or options.NETWORK. Raises IncompatiblePeer, InvalidArgument."""
    if invited.backend != "ucx":
        raise IncompatiblePeer(f"{invited.identity.instance_id}: backend {invited.backend!r} there, 'ucx' here")
    require_same(config.fingerprint, invited.fingerprint)
    require_sound(invited)
    ours, theirs = config.transport, invited.transport
    if {ours, theirs} == {"shm", "tcp"}:
        raise IncompatiblePeer(f"{invited.identity.instance_id}: transport {theirs!r} there, {ours!r} here")
    if "tcp" in (ours, theirs):
        return options.NETWORK
    if here.shares_memory_with(invited.identity):
        return options.SHM
    if "shm" in (ours, theirs):
        raise IncompatiblePeer(
            f"{invited.identity.instance_id}: transport 'shm' is demanded ({ours!r} here, {theirs!r} there), but the two processes do not "
            "share host, pid namespace and ipc namespace; use 'auto' or 'tcp'"
        )
    return options.NETWORK


def require_sound(invited: Invitation) -> None:
    """The numbers of the invitation agree with one another. Raises InvalidArgument. (Whether its memory is there is seen when it is mapped.)"""
    if not 1 <= invited.num_doorbells <= MAX_DOORBELLS:
        raise InvalidArgument(f"invitation: num_doorbells={invited.num_doorbells} is outside [1, {MAX_DOORBELLS}]")
    for name, needed in (("pool", 1), ("table", _LINE_BYTES + invited.num_doorbells * RECORD_BYTES), ("bell", _LINE_BYTES)):
        window = getattr(invited, name)
        if window.num_bytes < needed:
            raise InvalidArgument(f"invitation: window {name!r} has {window.num_bytes} bytes, must have at least {needed}")
    for name in ("table", "bell"):
        if (address := getattr(invited, name).address) % _LINE_BYTES:
            raise InvalidArgument(f"invitation: window {name!r} is at {address:#x}, must be a multiple of {_LINE_BYTES}")
    if not invited.worker:
        raise InvalidArgument("invitation: the worker's address is empty")
    for name in ("pool", "table", "bell", "scratch"):
        if not getattr(invited, name).key:
            raise InvalidArgument(f"invitation: window {name!r} has no remote key")


def watch(invited: Invitation, here: Identity) -> int:
    """A pidfd of the receiver, the caller's from here on: shared memory never tells that the other side is gone."""
    process = f"{invited.identity.instance_id}: its process {invited.identity.pid}"
    try:
        pidfd = os.pidfd_open(invited.identity.pid)
    except (ProcessLookupError, OverflowError) as error:
        raise PeerUnreachable(f"{process} has ended") from error
    except OSError as error:
        raise PeerUnreachable(f"{process} cannot be watched: {error}") from error
    try:
        if is_gone(invited.identity, here):
            raise PeerUnreachable(f"{process} has ended")
    except OSError as error:
        os.close(pidfd)
        raise PeerUnreachable(f"{process} cannot be watched: {error}") from error
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd
