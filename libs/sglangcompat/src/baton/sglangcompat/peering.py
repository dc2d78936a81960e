"""Decode's half of a pair: the request names prefill's bootstrap address; which server that is, the session with it says."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from baton.engine.types import Failure
from baton.servicekit import join_address
from baton.sglangcompat.sampling import refused
from baton.wire.v1 import worker_pb2
from baton.workerkit import RefusedError, WorkerFront
from baton.workerkit.session import GatewaySession

#: Prefill servers that stay connected for it; beyond them, the one that was asked for longest ago is let go.
MAX_PREFILLS = 64
MAX_HOST_CHARS = 255


class Peering:
    """Names to the front, as a gateway does, the prefill servers that requests speak of, and hears how the pairs are.

    timeout_s: how long a request may wait for a session with its prefill server.
    """

    is_prefill = False

    def __init__(self, front: WorkerFront, *, timeout_s: float) -> None:
        self._front = front
        self._timeout_s = timeout_s
        self._session = GatewaySession("sglang", "")
        self._addresses: OrderedDict[str, None] = OrderedDict()
        self._states: dict[str, worker_pb2.PeerState] = {}
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Hears of the pairs until cancelled, or until the front ends its sessions."""
        self._front.attach(self._session)
        try:
            while (report := await self._session.next_report()) is not None:
                if report.HasField("peers"):
                    self._states = {state.bootstrap_address: state for state in report.peers.peers}
                    news, self._news = self._news, asyncio.Event()
                    news.set()
        finally:
            self._front.detach(self._session)

    async def join(self, start: worker_pb2.Start, pairing: Any) -> None:
        address = _address(pairing)
        start.decode.bootstrap_address = address
        start.decode.prefill_instance_id = await self._instance_at(address)

    def forsake(self, room: int, failure: Failure) -> None:
        """Prefill waits for the publication that does not come, as it does where a gateway of ours could not start decode's leg."""

    async def _instance_at(self, address: str) -> str:
        self._name(address)
        try:
            async with asyncio.timeout(self._timeout_s):
                while not (instance_id := self._state(address).prefill_instance_id):
                    await self._news.wait()
        except TimeoutError:
            problem = self._state(address).problem or "not connected"
            text = f"no session with the prefill server at {address} within {self._timeout_s:g} s (--link-wait-s): {problem}"
            raise RefusedError("UNAVAILABLE", "prefill_lost", text) from None
        return instance_id

    def _state(self, address: str) -> worker_pb2.PeerState:
        return self._states.get(address) or worker_pb2.PeerState()

    def _name(self, address: str) -> None:
        is_new = address not in self._addresses
        self._addresses[address] = None
        self._addresses.move_to_end(address)
        if len(self._addresses) > MAX_PREFILLS:
            self._addresses.popitem(last=False)
        if is_new:
            self._front.set_peers(self._session, list(self._addresses))


def _address(pairing: Any) -> str:
    """host:port of prefill's bootstrap endpoint. Raises RefusedError."""
    host, port = pairing.bootstrap_host, pairing.bootstrap_port
    if not 0 < len(host) <= MAX_HOST_CHARS or not 0 < port <= 65535:
        what = "no address: this decode server needs that of prefill's --bootstrap-port; name it to the gateway behind prefill's own"
        raise refused("disaggregated_params", f"{host[:MAX_HOST_CHARS]!r}:{port}", what)
    return join_address(host, port)
