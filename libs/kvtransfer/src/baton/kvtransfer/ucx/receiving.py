"""The receiving half of an agent: the threads that look after its inboxes, the scratch memory for probes, and the invitations."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from baton.kvtransfer import _native
from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.errors import UCXError
from baton.kvtransfer.identity import Identity
from baton.kvtransfer.invitation import NO_WAY, Invitation, Way, Window
from baton.kvtransfer.ucx.contexts import Contexts, UcxContext, is_without_network
from baton.kvtransfer.ucx.region import UcxRegion

log = logging.getLogger("baton.kvtransfer")


@dataclass(frozen=True, slots=True)
class _Opened:
    """network: what senders over networks need besides the inbox; None: they cannot come."""

    inbox: _native.Inbox
    network: Way | None


class ReceivingSide:
    def __init__(self, contexts: Contexts, notices: _native.Notices, config: AgentConfig, here: Identity) -> None:
        self._contexts = contexts
        self._config = config
        self._here = here
        self._bell = self._allocate(_native.BELL_BYTES)
        num_bytes = max(config.probe_bytes, 1)
        self._scratch = UcxRegion(_native.Memory.allocate_device(contexts.device, num_bytes)) if config.device else self._allocate(num_bytes)
        self.native = _native.Receiver(self._bell.primary, contexts.device, notices, contexts.has_network, contexts.shared is not None)

    def open_inbox(self, sender_id: str, inbox_id: int, nonce: int, num_doorbells: int, pool: UcxRegion) -> tuple[_native.Inbox, bytes]:
        """The inbox and its invitation. Raises UCXError."""
        opened = self._open(inbox_id, nonce, num_doorbells, pool)
        try:
            return opened.inbox, self._invite(sender_id, pool, opened, nonce, num_doorbells).encode()
        except BaseException:
            self.native.forget(opened.inbox)
            raise

    def _open(self, inbox_id: int, nonce: int, num_doorbells: int, pool: UcxRegion) -> _Opened:
        shared = self._contexts.shared

        def with_network(context: UcxContext) -> _Opened:
            here = [region.memory_in(context) for region in (pool, self._scratch, self._bell)]
            inbox = self.native.open_inbox(inbox_id, nonce, num_doorbells, None if shared is None else shared.native, (here[0], here[1], here[2]))
            keys = [memory.pack_key() for memory in here]
            return _Opened(inbox, Way(inbox.network_address, pool=keys[0], table=inbox.network_table_key, bell=keys[2], scratch=keys[1]))

        if self._contexts.has_network:
            try:
                return self._contexts.over_network(with_network)
            except UCXError as error:
                if shared is None or not is_without_network(error):
                    raise
                log.warning("this inbox is for senders on this host only: %s", error)
        assert shared is not None
        return _Opened(self.native.open_inbox(inbox_id, nonce, num_doorbells, shared.native, None), None)

    def _invite(self, sender_id: str, pool: UcxRegion, opened: _Opened, nonce: int, num_doorbells: int) -> Invitation:
        inbox, shared = opened.inbox, self._contexts.shared
        here = opened.network
        if shared is not None:
            keys = [region.memory_in(shared).pack_key() for region in (pool, self._bell, self._scratch)]
            here = Way(inbox.shared_address, pool=keys[0], table=inbox.table_key(), bell=keys[1], scratch=keys[2])
        assert here is not None
        return Invitation(
            backend="ucx",
            transport=self._config.transport,
            sender_id=sender_id,
            identity=self._here,
            nonce=nonce,
            num_doorbells=num_doorbells,
            worker=here.worker,
            pool=Window(pool.address, pool.num_bytes, here.pool),
            table=Window(inbox.table_address, inbox.table_bytes, here.table),
            bell=Window(self._bell.address, self._bell.num_bytes, here.bell),
            scratch=Window(self._scratch.address, self._config.probe_bytes, here.scratch),
            network=None if here is opened.network else opened.network or NO_WAY,
            device=self._export(pool),
            device_scratch=self._export(self._scratch),
            fingerprint=self._config.fingerprint,
        )

    def _allocate(self, num_bytes: int) -> UcxRegion:
        shared = self._contexts.shared
        if shared is None:
            return UcxRegion(_native.Memory.allocate_private(num_bytes))
        return UcxRegion(_native.Memory.allocate_shared(shared.native, num_bytes), shared)

    def _export(self, region: UcxRegion) -> bytes:
        if not self._config.device or self._contexts.shared is None:
            return b""
        try:
            return region.primary.export_device()
        except UCXError as error:
            log.warning("the CUDA memory at %#x cannot be mapped by other processes (%s): writes go by UCX's puts", region.address, error)
            return b""
