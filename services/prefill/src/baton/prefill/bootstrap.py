"""The bootstrap endpoint: decode servers come here, say where their pages are, and publish rooms. One session a decode instance."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.engine.layout import KVLayout
from baton.kvtransfer import IncompatiblePeer, InvalidArgument, Peer, PeerUnreachable, RankMemories, Route, TransferError, routes
from baton.prefill.errors import BadPublicationError, TicketRefusedError
from baton.prefill.exporter import Exporter
from baton.prefill.link import DecodeLink, Way
from baton.prefill.publication import read_publication
from baton.prefill.ticket_gate import TicketGate
from baton.prefill.ways import close_ways, has_peer, open_ways, probe_ways, renewed
from baton.servicekit import get_logger
from baton.wire.v1 import bootstrap_pb2, bootstrap_pb2_grpc, common_pb2
from baton.workerkit import differences
from baton.workerkit.convert import failure_from_wire

log = get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

EXPIRE_PERIOD_S = 1.0
#: It stands in every message about the peer; gRPC's trailers hold 8 KiB.
MAX_INSTANCE_ID_CHARS = 256
#: How long a decode server may take to read the last answers.
LAST_WORDS_S = 1.0
#: When a way broke: how long its decode server's session may take to end as well, which says that it is the server that is gone.
SECOND_SIGN_S = 0.5
#: Connecting, probing and closing wait for a peer: each has a thread of its own up to this many, so that a dead one delays nobody else.
NUM_PEER_THREADS = 32


@dataclass(frozen=True, slots=True)
class Here:
    """This prefill server, as decode servers are told. layout: of one rank's pool."""

    instance_id: str
    fingerprint: common_pb2.KVFingerprint
    layout: KVLayout
    memories: RankMemories

    @property
    def degree(self) -> int:
        return len(self.memories.ranks)


@dataclass(frozen=True, slots=True)
class _End:
    """Why this server ends a session. way_broke: decode is well, as far as is known, and can come again at once."""

    reason: str
    way_broke: bool = False


@dataclass(eq=False)
class _Session:
    """One decode instance's session. `broken` holds the reason once it shall end; `ended` is set when nothing of it is left. `stale` is set when a
    way shall be laid anew, to one of `invitations`."""

    instance_id: str
    loop: asyncio.AbstractEventLoop
    outbox: asyncio.Queue[bootstrap_pb2.FromPrefill | None] = field(default_factory=asyncio.Queue)
    broken: asyncio.Future[_End] = field(init=False)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stale: asyncio.Event = field(default_factory=asyncio.Event)
    invitations: list[bytes] = field(default_factory=list)
    #: The connect in progress or done; whoever ends the session closes what came of it.
    connecting: asyncio.Future[list[Way]] | None = None
    ways: list[Way] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.broken = self.loop.create_future()

    def send(self, message: bootstrap_pb2.FromPrefill | None) -> None:
        """From any thread; None: the last. What may gather here is bounded by what decode published."""
        self._soon(lambda: self.outbox.put_nowait(message))

    def fail(self, reason: str) -> None:
        """From any thread: ends the session; decode then fences it and connects again."""
        self._end(_End(reason))

    def way_broke(self, reason: str) -> None:
        """From any thread: likewise, and says that it is not the server's fault."""
        self._end(_End(reason, way_broke=True))

    def renew(self) -> None:
        """From any thread: ways that have lost what they went through here are laid anew."""
        self._soon(self.stale.set)

    def _end(self, end: _End) -> None:
        self._soon(lambda: None if self.broken.done() else self.broken.set_result(end))

    def _soon(self, function: Callable[[], object]) -> None:
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: the process is ending
            return


class BootstrapServicer(bootstrap_pb2_grpc.BootstrapServicer):
    """`close` ends all sessions in order (peers closed, so that decode's fence succeeds); call it before the server stops."""

    def __init__(self, exporter: Exporter, here: Here, tickets: TicketGate) -> None:
        self._exporter = exporter
        self._here = here
        self._tickets = tickets
        self._sessions: dict[str, _Session] = {}
        self._threads = ThreadPoolExecutor(NUM_PEER_THREADS, thread_name_prefix="bootstrap-peer")
        self._closing = False
        for agent in here.memories.agents:
            agent.on_write(exporter.write_ended)
            agent.on_peer_lost(self._on_peer_lost)

    async def run(self) -> None:
        """The clock of publications that nobody claims, and of ways that nobody uses; until cancelled."""
        while True:
            await asyncio.sleep(EXPIRE_PERIOD_S)
            self._exporter.expire(time.monotonic())
            for way in [way for session in self._sessions.values() for way in session.ways]:
                way.peer.check()  # `_on_peer_lost` hears of it

    async def close(self) -> None:
        self._closing = True
        sessions = list(self._sessions.values())
        for session in sessions:
            session.fail("the prefill server is stopping")
        for session in sessions:
            await session.ended.wait()
        self._threads.shutdown(wait=False)

    async def Session(  # type: ignore[override]  # noqa: N802 # a coroutine that writes: the stubs know generators only
        self, request_iterator: AsyncIterator[bootstrap_pb2.FromDecode], context: Context
    ) -> None:
        try:
            end = await self._one(request_iterator, context)
        except DecodeError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"a message of the session cannot be read: {error}")
        if end is not None:
            await _refuse(context, grpc.StatusCode.ABORTED if end.way_broke else grpc.StatusCode.UNAVAILABLE, end.reason)

    async def _one(self, messages: AsyncIterator[bootstrap_pb2.FromDecode], context: Context) -> _End | None:
        """From the hello to the end; why we ended it, if we did."""
        hello = await self._greet(messages, context)
        session = await self._enter(hello.instance_id, context)
        try:
            link = await self._connect(session, hello, context)
            return await self._serve(session, link, messages, context)
        finally:
            await asyncio.shield(self._leave(session))

    async def _greet(self, messages: AsyncIterator[bootstrap_pb2.FromDecode], context: Context) -> bootstrap_pb2.DecodeHello:
        """Reads the hello, answers it, and refuses a pair whose pools differ."""
        first = await anext(aiter(messages), None)
        if first is None or first.WhichOneof("message") != "hello" or not 0 < len(first.hello.instance_id) <= MAX_INSTANCE_ID_CHARS:
            text = f"the first message of a session must be hello with an instance_id of 1 to {MAX_INSTANCE_ID_CHARS} characters"
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, text)
        here = self._here
        identity = here.memories.agents[0].identity  # of the process, which all agents share
        hello = bootstrap_pb2.PrefillHello(instance_id=here.instance_id, fingerprint=here.fingerprint, identity=identity, tensor_parallel=here.degree)
        await context.write(bootstrap_pb2.FromPrefill(hello=hello))
        differing = differences(here.fingerprint, first.hello.fingerprint)
        if differing:
            text = f"prefill {here.instance_id} (here) and decode {first.hello.instance_id} (there) do not fit: {'; '.join(differing)}"
            log.error("pair refused", peer=first.hello.instance_id, reason=text)
            await _refuse(context, grpc.StatusCode.FAILED_PRECONDITION, f"{text}; serve the same model with the same settings on both")
        if self._closing:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, "the prefill server is stopping")
        return first.hello

    async def _enter(self, instance_id: str, context: Context) -> _Session:
        """One session a decode instance: an older one is half dead, and ends first."""
        while (old := self._sessions.get(instance_id)) is not None:
            old.fail("the same decode server opened a new session")
            await old.ended.wait()
        session = self._sessions[instance_id] = _Session(instance_id, asyncio.get_running_loop())
        return session

    async def _connect(self, session: _Session, hello: bootstrap_pb2.DecodeHello, context: Context) -> DecodeLink:
        """Opens the way into decode's pages and measures it; the verdict tells decode that it may publish."""
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        num_kv_heads = self._here.layout.num_kv_heads * self._here.degree  # decode's too: the fingerprints agree
        try:
            degree, session.invitations = _ranks_of(hello)
            every = routes(num_kv_heads, self._here.degree, degree)
            session.ways = await self._open(session, every)
            points = await loop.run_in_executor(self._threads, probe_ways, session.ways)
        except TransferError as error:
            log.error("no way to decode", peer=hello.instance_id, error=str(error))
            await _refuse(context, _code(error), f"prefill {self._here.instance_id} cannot write to decode {hello.instance_id}: {error}")
        ours = self._here.layout
        layout = replace(ours, num_kv_heads=num_kv_heads // degree, num_pages=hello.num_pages)
        link = DecodeLink(hello.instance_id, session.ways, layout, hello.page_hash, session.send, session.way_broke, session.renew)
        verdict = bootstrap_pb2.PeerVerdict(transport=link.transport)
        for point in points:
            verdict.points.add(bytes=point.num_bytes, gigabytes_per_s=point.gigabytes_per_s)
        speeds = {f"write_{point.num_bytes}_gb_s": round(point.gigabytes_per_s, 2) for point in points}
        took_ms = round((time.monotonic() - began) * 1e3)
        log.info("decode connected", peer=hello.instance_id, transport=link.transport, routes=len(every), took_ms=took_ms, **speeds)
        await context.write(bootstrap_pb2.FromPrefill(verdict=verdict))
        return link

    async def _open(self, session: _Session, every: Sequence[Route]) -> list[Way]:
        """Raises TransferError. Whoever ends the session meanwhile closes what comes of it."""
        connecting = asyncio.get_running_loop().run_in_executor(self._threads, open_ways, every, self._here.memories.ranks, session.invitations)
        session.connecting = connecting
        return await asyncio.shield(connecting)

    async def _serve(self, session: _Session, link: DecodeLink, messages: AsyncIterator[bootstrap_pb2.FromDecode], context: Context) -> _End | None:
        """Until either side ends it; why we did, if we did."""
        reader = asyncio.create_task(self._read(link, messages))
        writer = asyncio.create_task(self._write(session, context))
        renewer = asyncio.create_task(self._renew(session, link))
        end = None
        try:
            await asyncio.wait((reader, writer, renewer, session.broken), return_when=asyncio.FIRST_COMPLETED)
            if session.broken.done():
                end = await _judged(session.broken.result(), link, reader)
                return end
            error = next(task.exception() for task in (reader, writer, renewer) if task.done())
            if error is not None and not isinstance(error, grpc.aio.BaseError):
                raise error
            return None
        finally:
            end = end or _End("its session ended")
            log.info("decode disconnected", peer=session.instance_id, reason=end.reason)
            reader.cancel()
            renewer.cancel()
            self._exporter.link_closing(link, end.reason, way_broke=end.way_broke)
            await asyncio.shield(self._close_ways(link))
            # A write that is cancelled half way leaves the call unable to end with a status: let it finish where decode still reads.
            session.send(None)
            await asyncio.wait((writer,), timeout=LAST_WORDS_S)
            writer.cancel()
            await asyncio.gather(reader, writer, renewer, return_exceptions=True)

    async def _renew(self, session: _Session, link: DecodeLink) -> None:
        """Lays ways anew that have lost what they went through here, into the same pages; the session ends where that cannot be."""
        while True:
            await session.stale.wait()
            session.stale.clear()
            lost = [way for way in link.ways if not way.peer.check()]
            if not lost:
                continue  # asked twice
            why = "; ".join(dict.fromkeys(way.peer.missing or "the path broke" for way in lost))
            try:
                fresh = await self._open(session, [way.route for way in lost])
            except TransferError as error:
                session.way_broke(f"{why}, and there is no other: {error}")
                return
            session.ways = renewed(link.ways, fresh)
            link.ways = tuple(session.ways)
            log.warning("way to decode laid anew", peer=link.instance_id, reason=why, ways=len(fresh), transport=link.transport)
            self._exporter.link_renewed(link)
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, close_ways, lost))

    async def _close_ways(self, link: DecodeLink) -> None:
        """Ends all writing through the link; only then may source pages be free."""
        await asyncio.get_running_loop().run_in_executor(self._threads, close_ways, link.ways)
        self._exporter.link_closed(link)

    async def _leave(self, session: _Session) -> None:
        if session.connecting is not None:
            with contextlib.suppress(TransferError):
                ways = await session.connecting
                await asyncio.get_running_loop().run_in_executor(self._threads, close_ways, ways)
        if self._sessions.get(session.instance_id) is session:
            del self._sessions[session.instance_id]
        session.ended.set()

    async def _read(self, link: DecodeLink, messages: AsyncIterator[bootstrap_pb2.FromDecode]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "publish":
                    self._publish(link, message.publish)
                case "revoke":
                    revoke = message.revoke
                    failure = failure_from_wire(revoke.failure, default_origin="decode")
                    self._exporter.revoked(link, revoke.room, revoke.lease_generation, failure)
                case kind:
                    log.warning("message out of turn ignored", peer=link.instance_id, kind=kind)

    def _publish(self, link: DecodeLink, message: bootstrap_pb2.Publish) -> None:
        try:
            self._tickets.check(message, link.instance_id)
        except TicketRefusedError as error:
            self._exporter.turn_away(link, message.room, message.lease_generation, error.failure)
            return
        try:
            publication = read_publication(message, link)
        except BadPublicationError as error:
            self._exporter.reject(link, message.room, message.lease_generation, error)
            return
        self._exporter.published(publication)

    async def _write(self, session: _Session, context: Context) -> None:
        while (message := await session.outbox.get()) is not None:
            await context.write(message)

    def _on_peer_lost(self, peer: Peer) -> None:
        """On the transfer library's notifier."""
        for session in list(self._sessions.values()):
            if has_peer(session.ways, peer):
                if peer.missing:
                    session.renew()
                else:
                    session.way_broke(f"the way to decode {peer.instance_id} broke")


async def _judged(end: _End, link: DecodeLink, reader: asyncio.Task[None]) -> _End:
    """A way breaks too when the server at its end is gone: then its session ends at the same time. What is missing here is no sign of that."""
    if not end.way_broke or any(way.peer.missing for way in link.ways):
        return end
    await asyncio.wait((reader,), timeout=SECOND_SIGN_S)
    return replace(end, way_broke=not reader.done())


def _ranks_of(hello: bootstrap_pb2.DecodeHello) -> tuple[int, list[bytes]]:
    """Decode's degree and the invitation of each rank. Raises InvalidArgument."""
    degree = hello.tensor_parallel or 1
    invitations = list(hello.invitations) or [hello.invitation]
    if len(invitations) != degree:
        raise InvalidArgument(f"invitations: {len(invitations)} of them, tensor_parallel={degree} makes it one for each rank")
    return degree, invitations


def _code(error: TransferError) -> grpc.StatusCode:
    if isinstance(error, IncompatiblePeer):
        return grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(error, InvalidArgument):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, PeerUnreachable):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.INTERNAL


async def _refuse(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort returns never")
