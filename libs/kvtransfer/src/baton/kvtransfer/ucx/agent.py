"""The process's side of the library, over UCX: regions, inboxes and peers, and the order in which they come and go."""

from __future__ import annotations

import atexit
import itertools
import logging
import secrets
import weakref
from collections.abc import Callable

from baton.kvtransfer import _native
from baton.kvtransfer.base import Agent, Inbox, Peer, Region, WriteHandle
from baton.kvtransfer.checks import whole
from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.errors import Closed, IncompatiblePeer, InvalidArgument, PeerUnreachable, UCXError, UnexpectedTransport
from baton.kvtransfer.identity import Identity
from baton.kvtransfer.invitation import Invitation
from baton.kvtransfer.ucx import footholds, library, options, routing
from baton.kvtransfer.ucx.birthplace import Birthplace
from baton.kvtransfer.ucx.contexts import Contexts, UcxContext
from baton.kvtransfer.ucx.inbox import UcxInbox
from baton.kvtransfer.ucx.notifier import Notifier
from baton.kvtransfer.ucx.peer import UcxPeer
from baton.kvtransfer.ucx.receiving import ReceivingSide
from baton.kvtransfer.ucx.region import UcxRegion
from baton.kvtransfer.ucx.sending import SendingSide
from baton.kvtransfer.ucx.write import UcxWriteHandle

log = logging.getLogger("baton.kvtransfer")

#: Native threads must be gone before UCX's own exit handlers run.
_open_agents: weakref.WeakSet[UcxAgent] = weakref.WeakSet()


@atexit.register
def _close_leaked() -> None:
    for agent in list(_open_agents):
        if not agent.is_inherited:
            log.warning("kvtransfer agent %s was never closed", agent.instance_id)
            agent.close()


def _dropped(notifier: Notifier, birthplace: Birthplace) -> None:
    """Of an agent that nobody closed, and that has no inbox and no peer any more (they would hold it): the last thread ends too."""
    if not birthplace.is_elsewhere:
        notifier.notices.close()


class UcxAgent(Agent):
    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._library = library.load(config.ucx_library)
        self._here = Identity.of_this_process(config.instance_id)
        self._birthplace = Birthplace()
        self._device = int(config.device) if config.device else -1
        self._contexts = Contexts(config, self._device)
        self._notifier = Notifier()
        self._lock = self._notifier.lock
        self._ids = itertools.count(1)
        self._regions: weakref.WeakSet[UcxRegion] = weakref.WeakSet()
        self._sides: dict[str, SendingSide] = {}
        self._receiving: ReceivingSide | None = None
        self._is_closed = False
        _open_agents.add(self)
        weakref.finalize(self, _dropped, self._notifier, self._birthplace).atexit = False
        log.info("kvtransfer agent %s: %s", config.instance_id, self.description)

    @property
    def instance_id(self) -> str:
        return self._config.instance_id

    @property
    def identity(self) -> bytes:
        return self._here.encode()

    @property
    def description(self) -> str:
        memory = f"CUDA device {self._device}" if self._device >= 0 else "host memory"
        return f"UCX {self._library.version} from {self._library.path}, transport {self._config.transport}, {memory}"

    @property
    def is_inherited(self) -> bool:
        """Whether this is a fork's copy of the agent: without its threads, and with memory that belongs to the parent."""
        return self._birthplace.is_elsewhere

    def allocate(self, num_bytes: int) -> UcxRegion:
        num_bytes = whole("num_bytes", num_bytes, 1, 1 << 63)
        shared = self._contexts.shared
        if shared is None:
            return self._keep(lambda: UcxRegion(_native.Memory.allocate_private(num_bytes)))
        return self._keep(lambda: UcxRegion(_native.Memory.allocate_shared(shared.native, num_bytes), shared))

    def register(self, address: int, num_bytes: int) -> UcxRegion:
        if num_bytes < 1 or address < 1 or address + num_bytes > 1 << 63:
            raise InvalidArgument(f"address={address:#x}, num_bytes={num_bytes}: both must be at least 1, and their sum at most 2**63")

        def adopt() -> UcxRegion:
            context = self._contexts.any()
            return UcxRegion(_native.Memory.adopt(context.native, address, num_bytes), context)

        return self._keep(adopt)

    def open_inbox(self, sender_id: str, region: Region, num_doorbells: int = 1024) -> UcxInbox:
        region = self._of_this_agent("region", region)
        num_doorbells = whole("num_doorbells", num_doorbells, 1, routing.MAX_DOORBELLS)
        self._birthplace.require()
        with self._lock:
            self._require_open()
            if self._receiving is None:
                self._receiving = ReceivingSide(self._contexts, self._notifier.notices, self._config, self._here)
            side = self._receiving
        inbox_id, nonce = next(self._ids), secrets.randbits(63) | 1
        native, invitation = side.open_inbox(sender_id, inbox_id, nonce, num_doorbells, region)
        with self._lock:
            if self._is_closed:
                side.native.forget(native)
            self._require_open()
            inbox = self._notifier.inboxes[inbox_id] = UcxInbox(
                sender_id,
                native,
                side.native,
                invitation,
                num_doorbells,
                self._contexts.shared is not None,
                self._here,
                self._birthplace,
                forget=lambda: self._notifier.take(self._notifier.inboxes, inbox_id),
            )
            return inbox

    def connect(self, invitation: bytes, source: Region) -> UcxPeer:
        invited = Invitation.decode(invitation)
        source = self._of_this_agent("source", source)
        path = routing.path_to(invited, self._config, self._here)
        try:
            peer = self._new_peer(invited, source, path)
        except UCXError as error:
            raise PeerUnreachable(f"{invited.identity.instance_id} over {path}: {error}") from error
        try:
            peer.link.connect(int(self._config.connect_timeout_s * 1e9))
            self._require_expected(peer)
            if path == options.NETWORK:
                peer.stand_on(footholds.of(peer.info))
        except UCXError as error:
            peer.close()
            raise PeerUnreachable(
                f"{invited.identity.instance_id} over {path}, within {self._config.connect_timeout_s} s (connect_timeout_s): {error.reason}"
            ) from error
        except UnexpectedTransport:
            peer.close()
            raise
        log.info("connected to %s over %s", peer.instance_id, peer.transport)
        return peer

    def _new_peer(self, invited: Invitation, source: UcxRegion, path: str) -> UcxPeer:
        self._require_open()
        if path == options.NETWORK:
            invited = invited.over_network()
            return self._contexts.over_network(lambda context: self._peer_from(context, invited, source, path))
        if self._contexts.shared is None:
            raise IncompatiblePeer(
                f"{invited.identity.instance_id} is on this host, where pages go through shared memory, which ucx_options TLS="
                f"{self._config.ucx_options.get('TLS')!r} leaves out here; add sysv to it, or use transport 'tcp'"
            )
        return self._peer_from(self._contexts.shared, invited, source, path)

    def _peer_from(self, context: UcxContext, invited: Invitation, source: UcxRegion, path: str) -> UcxPeer:
        memory = source.memory_in(context)
        with self._lock:
            side = self._sending_side(path)
            queue = side.pick_queue()  # the agent is not closed before the queue can be stopped
        link_id = secrets.randbits(63) | 1  # receivers tell the links of all senders apart by it
        link = _native.Link(
            queue,
            invited,
            memory,
            link_id,
            path == options.SHM,
            routing.watch(invited, self._here) if path == options.SHM else -1,
            self._config.max_in_flight,
            self._config.max_put_bytes,
            invited.device if self._device >= 0 else b"",
            invited.device_scratch if self._device >= 0 else b"",
        )
        with self._lock:
            self._require_open()
            forget = lambda: self._notifier.take(self._notifier.peers, link_id)  # noqa: E731
            peer = self._notifier.peers[link_id] = UcxPeer(
                link, invited, source.num_bytes, self._config.probe_timeout_s, side, context, self._birthplace, self._begin, forget
            )
            return peer

    def on_doorbell(self, callback: Callable[[Inbox], None]) -> None:
        self._notifier.on_doorbell.append(callback)

    def on_write(self, callback: Callable[[WriteHandle], None]) -> None:
        self._notifier.on_write.append(callback)

    def on_peer_lost(self, callback: Callable[[Peer], None]) -> None:
        self._notifier.on_peer_lost.append(callback)

    def close(self) -> None:
        if self.is_inherited:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            peers, inboxes, regions = list(self._notifier.peers.values()), list(self._notifier.inboxes.values()), list(self._regions)
        _open_agents.discard(self)
        for peer in peers:
            peer.close()
        for side in self._sides.values():
            side.stop()
        for inbox in inboxes:
            inbox.close()
        if self._receiving is not None:
            self._receiving.native.stop()
        self._notifier.close()
        for region in regions:
            region.close()
        self._sides.clear()
        self._receiving = None

    def _require_open(self) -> None:
        if self._is_closed:
            raise Closed("the agent is closed")
        self._birthplace.require()

    def _of_this_agent(self, name: str, region: Region) -> UcxRegion:
        """Another agent's region is closed with that agent, under the writes of this one."""
        if not isinstance(region, UcxRegion):
            raise InvalidArgument(f"{name} is a {type(region).__name__}, must come from this agent")
        with self._lock:
            self._require_open()
            if region not in self._regions:
                raise InvalidArgument(f"{name} is a region of another agent, must come from {self.instance_id}")
        return region

    def _keep(self, make: Callable[[], UcxRegion]) -> UcxRegion:
        self._require_open()
        region = make()  # registering much memory takes long: others go on meanwhile
        with self._lock:
            self._require_open()
            self._regions.add(region)
            return region

    def _begin(self, link: _native.Link, peer: UcxPeer, room: int) -> UcxWriteHandle | None:
        with self._lock:  # the notifier must not see the end of a write before the write
            write_id = next(self._ids)
            write = link.begin(write_id, room)
            if write is None:
                return None
            handle = self._notifier.writes[write_id] = peer.wrap(write)
            return handle

    def _sending_side(self, path: str) -> SendingSide:
        self._require_open()
        if path not in self._sides:
            context = self._contexts.shared if path == options.SHM else None
            self._sides[path] = SendingSide(context, self._device, self._notifier.notices, self._config)
        return self._sides[path]

    def _require_expected(self, peer: UcxPeer) -> None:
        expected = self._config.expected_transport
        if expected and expected not in peer.transport:
            raise UnexpectedTransport(
                f"{peer.instance_id}: UCX chose {peer.transport!r}, expected_transport={expected!r}; allow that path, or find out why the other one "
                "is not there"
            )
