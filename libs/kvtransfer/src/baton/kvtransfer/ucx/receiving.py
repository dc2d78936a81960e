"""The receiving half of an agent: the threads that look after its inboxes, the scratch memory for probes, and the invitations."""

from __future__ import annotations

import logging

from baton.kvtransfer import _native
from baton.kvtransfer.config import AgentConfig
from baton.kvtransfer.errors import UCXError
from baton.kvtransfer.identity import Identity
from baton.kvtransfer.invitation import Invitation, Window
from baton.kvtransfer.ucx import options

log = logging.getLogger("baton.kvtransfer")


class ReceivingSide:
    def __init__(self, context: _native.Context, notices: _native.Notices, config: AgentConfig, here: Identity) -> None:
        self._config = config
        self._here = here
        self._is_shared = options.shares_memory(config)
        self.native = _native.Receiver(context, notices, config.transport != "shm", self._is_shared)
        num_bytes = max(config.probe_bytes, 1)
        if config.device:
            self._scratch = _native.Memory.allocate_device(context, num_bytes)
        else:
            self._scratch = _native.Memory.allocate(context, num_bytes, self._is_shared)

    def open_inbox(self, inbox_id: int, nonce: int, num_doorbells: int, pool: _native.Memory) -> _native.Inbox:
        return self.native.open_inbox(inbox_id, nonce, num_doorbells, pool, self._scratch)

    def invite(self, sender_id: str, pool: _native.Memory, inbox: _native.Inbox, nonce: int, num_doorbells: int) -> bytes:
        return Invitation(
            backend="ucx",
            transport=self._config.transport,
            sender_id=sender_id,
            identity=self._here,
            nonce=nonce,
            num_doorbells=num_doorbells,
            worker=inbox.worker_address,
            pool=Window(pool.address, pool.num_bytes, pool.pack_key()),
            table=Window(inbox.table_address, inbox.table_bytes, inbox.table_key()),
            bell=Window(self.native.bell_address, self.native.bell_bytes, self.native.bell_key()),
            scratch=Window(self._scratch.address, self._config.probe_bytes, self._scratch.pack_key()),
            device=self._export(pool),
            device_scratch=self._export(self._scratch),
            fingerprint=self._config.fingerprint,
        ).encode()

    def _export(self, memory: _native.Memory) -> bytes:
        if not self._config.device or not self._is_shared:
            return b""
        try:
            return memory.export_device()
        except UCXError as error:
            log.warning("the CUDA memory at %#x cannot be mapped by other processes (%s): writes go by UCX's puts", memory.address, error)
            return b""
