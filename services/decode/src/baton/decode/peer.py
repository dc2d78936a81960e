"""The way to one bootstrap address: connected, and again when it ends; every ended session is fenced before its pages count as free."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from baton.decode.bootstrap_session import Answers, BootstrapSession, Call, MakeHello
from baton.decode.errors import PairRefusedError, SessionEndedError, WayLostError
from baton.decode.inboxes import Inboxes
from baton.decode.link import PrefillLink
from baton.kvtransfer import RankMemory, TransferError
from baton.kvtransfer.identity import Identity
from baton.servicekit import Tls, get_logger, open_channel
from baton.servicekit.tls import explain_refusal
from baton.wire.channel import CHANNEL_OPTIONS
from baton.wire.v1 import bootstrap_pb2_grpc, worker_pb2

log = get_logger(__name__)

T = TypeVar("T")

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
#: A pair that does not fit is asked again now and then: the other side may be restarted with other settings.
REFUSED_BACKOFF_S = 5.0
LET_GO = "this decode server let go of it"
#: Prefill's word for it (BootstrapServicer.Session); a read may return it or raise it.
WAY_BROKE = grpc.StatusCode.ABORTED
#: How long prefill has to come another way, when what its way into an inbox goes through on this host is gone; then it gets another inbox.
CUT_OFF_AFTER_S = 2.0
FENCE_PERIOD_S = 0.05
MAX_FENCE_PERIOD_S = 1.0


class Leases(Answers, Protocol):
    """What a peer tells of its sessions; the importer."""

    def link_ready(self, address: str) -> None: ...

    def link_cut_off(self, link: PrefillLink, reason: str) -> None: ...

    def link_lost(self, link: PrefillLink, reason: str, *, way_broke: bool) -> None: ...

    def link_fenced(self, link: PrefillLink) -> None: ...

    def has_leases(self, link: PrefillLink) -> bool: ...


@dataclass(frozen=True, slots=True)
class Doors:
    """What every peer needs: where pages land, who keeps the leases, where blocking calls run."""

    ranks: Sequence[RankMemory]
    leases: Leases
    hello: MakeHello
    here: Identity
    tls: Tls
    num_doorbells: int
    threads: Executor
    #: Called with a fault of ours that no retry can mend.
    fatal: Callable[[BaseException], None]
    #: Called when a session came up or ended.
    changed: Callable[[], None]


class PrefillPeer:
    """Runs until `close`. `link` is the session that is ready, if any; `problem` says why there is none."""

    def __init__(self, address: str, doors: Doors) -> None:
        self.address = address
        self.link: PrefillLink | None = None
        self.transport = ""
        self.gigabytes_per_s = 0.0
        self.problem = "not connected yet"
        #: Why this server could not open an inbox for it the last time; "": it could.
        self.obstacle = ""
        self._doors = doors
        self._session: BootstrapSession | None = None
        self._cut_off_since: float | None = None
        self._sessions = 0
        self._fences: set[asyncio.Task[None]] = set()
        self._log = log.bind(address=address)
        self._task = asyncio.create_task(self._run(), name=f"prefill peer {address}")
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Ends the session. What it left in quarantine is fenced on."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def fenced(self) -> None:
        """Waits until every ended session is fenced."""
        await asyncio.gather(*self._fences)

    def look(self, now: float) -> None:
        """Whether what prefill writes still arrives. now: time.monotonic()."""
        session, link = self._session, self.link
        missing = session.inboxes.missing if session is not None and link is not None else ""
        if session is None or link is None or not missing:
            self._cut_off_since = None
        elif self._cut_off_since is None:
            self._cut_off_since = now
        elif now - self._cut_off_since >= CUT_OFF_AFTER_S:
            reason = f"{missing} of this server, which it went through, is gone"
            self._doors.leases.link_cut_off(link, reason)
            session.cut_off(reason)
            self._session = None

    def state(self) -> worker_pb2.PeerState:
        """What gateways are told. From any thread."""
        link = self.link
        if link is None:
            return worker_pb2.PeerState(bootstrap_address=self.address, problem=self.problem)
        return worker_pb2.PeerState(
            bootstrap_address=self.address,
            prefill_instance_id=link.instance_id,
            transport=self.transport,
            gigabytes_per_s=self.gigabytes_per_s,
        )

    @property
    def num_unfenced(self) -> int:
        return len(self._fences)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Only `close` ends the task; anything else is a fault of ours, and the process must not go on without this peer."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.problem = f"given up: {error!r}"
            self._doors.fatal(error)

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_ready = await self._one_session()
            backoff_s = FIRST_BACKOFF_S if was_ready else min(backoff_s * 2, MAX_BACKOFF_S)
            if self.problem.startswith("refused"):
                backoff_s = REFUSED_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _one_session(self) -> bool:
        """From connecting to the end of the stream; whether it was ready in between. A fresh channel and fresh inboxes each time."""
        self._sessions += 1
        key = f"{self.address}#{self._sessions}"
        doors = self._doors
        try:
            inboxes = await self._blocking(lambda: Inboxes.open(key, doors.ranks, doors.num_doorbells))
        except TransferError as error:
            problem = self.obstacle = f"no inbox can be opened: {error}"
            if problem != self.problem:
                self.problem = problem
                self._doors.changed()
            self._log.error("no inbox", error=str(error))
            return False
        self.obstacle = ""
        session = self._session = BootstrapSession(key, self.address, inboxes, doors.hello(inboxes), doors.here)
        problem, way_broke = LET_GO, False
        try:
            async with open_channel(self.address, doors.tls, CHANNEL_OPTIONS) as channel:
                call: Call = bootstrap_pb2_grpc.BootstrapStub(channel).Session()
                try:
                    link = await session.greet(call)
                    self._came(session, link)
                    await session.serve(call, doors.leases)
                finally:
                    call.cancel()
        except PairRefusedError as error:
            problem = f"refused: {error}"
        except WayLostError as error:
            problem, way_broke = f"the way from prefill broke: {error}", True
        except (SessionEndedError, grpc.aio.AioRpcError, grpc.aio.UsageError, TransferError, TimeoutError) as error:
            problem = _explain(error, doors.tls, was_in_use=session.link is not None)
            way_broke = isinstance(error, grpc.aio.AioRpcError) and error.code() is WAY_BROKE
        finally:
            self._went(session.link, inboxes, problem, way_broke=way_broke)
        return session.link is not None

    def _came(self, session: BootstrapSession, link: PrefillLink) -> None:
        self.link, self.problem = link, ""
        self.transport, self.gigabytes_per_s = session.transport, session.gigabytes_per_s
        self._doors.leases.link_ready(self.address)
        self._doors.changed()

    def _went(self, link: PrefillLink | None, inboxes: Inboxes, problem: str, *, way_broke: bool) -> None:
        if problem == LET_GO:
            self._log.info("prefill let go")
        elif link is not None:
            self._log.warning("prefill lost", peer=link.instance_id, problem=problem)
        elif problem != self.problem:
            self._log.warning("prefill away", problem=problem)
        changed = problem != self.problem
        self.link, self.problem, self._session, self._cut_off_since = None, problem, None, None
        if changed:
            self._doors.changed()
        if link is not None:
            self._doors.leases.link_lost(link, problem, way_broke=way_broke)
        fence = asyncio.create_task(self._fence(link, inboxes), name=f"fence of {inboxes.sender_id}")
        self._fences.add(fence)
        fence.add_done_callback(self._fences.discard)

    async def _fence(self, link: PrefillLink | None, inboxes: Inboxes) -> None:
        """Shuts the sender out and waits for the proof; only then are its pages free and its inboxes gone. No timer stands in for the proof."""
        identity = link.identity if link is not None else None
        period_s = FENCE_PERIOD_S
        while link is not None and not await self._blocking(lambda: inboxes.fence(identity)):
            await asyncio.sleep(period_s)
            period_s = min(period_s * 2, MAX_FENCE_PERIOD_S)
        if link is not None:
            self._doors.leases.link_fenced(link)
            while self._doors.leases.has_leases(link):  # noqa: ASYNC110 # rare and short: what had landed is still being checked
                await asyncio.sleep(FENCE_PERIOD_S)
        await self._blocking(inboxes.close)

    async def _blocking(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._doors.threads, function)


def _explain(error: BaseException, tls: Tls, *, was_in_use: bool) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {explain_refusal(error.details() or '', tls, was_in_use=was_in_use)}"
    return str(error) or type(error).__name__
