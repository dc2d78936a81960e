"""A worker's front: gateway sessions on one side, the engine's host on the other. Lives on one event loop; nothing here blocks it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from opentelemetry import trace

from baton.engine.grammar import Grammar, GrammarError, Grammars
from baton.engine.types import EngineEvent, Failed, Failure, KVReady, PromptLogprobs, Role, Token, Transferred
from baton.servicekit import FailedRoom, Metrics, extract_traceparent, get_logger, mark_failed
from baton.wire.status import stage_name
from baton.wire.v1 import common_pb2, worker_pb2
from baton.workerkit.convert import ROLES, event_to_wire, failure_to_wire, load_to_wire
from baton.workerkit.ended_legs import EndedLegs
from baton.workerkit.errors import HostStoppedError, RefusedError
from baton.workerkit.grammar_desk import GrammarDesk
from baton.workerkit.host import Batch, EngineHost
from baton.workerkit.intake import SAMPLING_LEVEL, Limits, take
from baton.workerkit.metrics import ReplyTime, TransferMetrics, observe_engine, observe_front
from baton.workerkit.reaper import Reaper
from baton.workerkit.rooms import OpenRoom, RoomTable, ends, open_room
from baton.workerkit.session import GatewaySession
from baton.workerkit.transfer_spans import trace_transfer

log = get_logger(__name__)

LOAD_PERIOD_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Description:
    """What never changes about a worker while it runs. bootstrap_address: host:port, prefill only."""

    instance_id: str
    model: str
    version: str
    fingerprint: common_pb2.KVFingerprint
    bootstrap_address: str = ""


class WorkerFront:
    """Rooms in, reports out.

    grammars: of the model that is served.
    on_refused: called with (room, failure) when a Start was refused at intake: whoever else waits for that room must be told.
    on_peers: called with the union of what all gateways named in Peers, whenever it changed.
    on_lost: called once with the exception that ended the engine, after every open room was failed.
    """

    def __init__(
        self,
        host: EngineHost,
        limits: Limits,
        description: Description,
        *,
        grammars: Grammars,
        max_rooms: int,
        tracer: trace.Tracer,
        on_refused: Callable[[int, Failure], None] | None = None,
        on_peers: Callable[[frozenset[str]], None] | None = None,
        on_lost: Callable[[BaseException], None] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._host = host
        self._limits = limits
        self._description = description
        self._grammars = GrammarDesk(grammars)
        self._max_rooms = max_rooms
        self._tracer = tracer
        self._ended_legs = EndedLegs(tracer)
        self._on_refused = on_refused or (lambda room, failure: None)
        self._on_peers = on_peers or (lambda addresses: None)
        self._on_lost = on_lost or (lambda error: None)
        self._origin = "decode" if limits.role is Role.PLAIN else limits.role.value
        self._rooms: RoomTable[GatewaySession] = RoomTable()
        self._reaper = Reaper(self._on_due)
        self._sessions: dict[GatewaySession, frozenset[str]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_task: asyncio.Task[None] | None = None
        self._peer_states: worker_pb2.PeerStates | None = None
        self.draining = False
        self._drain_begun = asyncio.Event()
        self.counters: Counter[str] = Counter()
        self._failures: Counter[FailedRoom] = Counter()
        self._transfers: TransferMetrics | None = None
        self._reply: ReplyTime | None = None
        if metrics is not None and metrics.enabled:
            self._transfers = TransferMetrics(metrics, limits.role)
            self._reply = ReplyTime(metrics)
            observe_engine(metrics, host, limits.role)
            observe_front(metrics, self.counters, self._failures, lambda: len(self._rooms))

    # --- life -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine's thread and the load reports. Call on the event loop."""
        loop = asyncio.get_running_loop()
        self._host.start(
            lambda batch: _call_soon(loop, self._on_batch, batch),
            lambda error: _call_soon(loop, self._on_engine_lost, error),
        )
        self._load_task = loop.create_task(self._report_load())

    def drain(self) -> None:
        """Refuses every Start from now on; what runs goes on. Idempotent."""
        if not self.draining:
            self.draining = True
            self._drain_begun.set()
            log.info("draining", rooms=len(self._rooms))
            self._send_load(force=True)

    async def wait_draining(self) -> None:
        """Waits until `drain` was called, by this process or a gateway."""
        await self._drain_begun.wait()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no room is open; False when `timeout_s` is over first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def abort_all(self, cause: str, message: str) -> None:
        """Asks the engine to end every open room."""
        for entry in self._rooms.all():
            self._abort(entry, Failure("UNAVAILABLE", self._origin, cause, message))

    def end_sessions(self) -> None:
        """Ends every gateway's stream after its last report."""
        for session in self._sessions:
            session.end()

    async def close(self) -> None:
        """Stops the timers and the engine's thread. Rooms must be over, or they are dropped."""
        self._reaper.close()
        self._grammars.close()
        if self._load_task is not None:
            self._load_task.cancel()
        await asyncio.to_thread(self._host.stop)

    def peers_changed(self, states: worker_pb2.PeerStates) -> None:
        """Tells every gateway how the pairs with this worker are (decode only)."""
        self._peer_states = states
        for session in self._sessions:
            session.peers(states)

    # --- what gateways ask ----------------------------------------------------------------------------------------------------

    def attach(self, session: GatewaySession) -> None:
        self._sessions[session] = frozenset()
        session.load(self._load(), self.draining)
        if self._peer_states is not None:
            session.peers(self._peer_states)
        log.info("gateway attached", gateway_id=session.gateway_id, gateway_address=session.gateway_address)

    def detach(self, session: GatewaySession) -> None:
        """The session is over: its rooms are ended, its peers forgotten."""
        named = self._sessions.pop(session, frozenset())
        rooms = self._rooms.of(session)
        log.info("gateway gone", gateway_id=session.gateway_id, rooms=len(rooms))
        for entry in rooms:
            message = f"the session of gateway {session.gateway_id} ended while room {entry.room} was open"
            self._abort(entry, Failure("UNAVAILABLE", "gateway", "gateway_lost", message))
        if named:
            self._tell_peers()

    def set_peers(self, session: GatewaySession, addresses: Sequence[str]) -> None:
        self._sessions[session] = frozenset(addresses)
        self._tell_peers()

    def gateway_address(self) -> str:
        """Where clients should go: what the gateway that attached last said; empty when none ever did."""
        return next((session.gateway_address for session in reversed(self._sessions)), "")

    def start_room(self, session: GatewaySession, start: worker_pb2.Start) -> None:
        """Takes a room or refuses it; either way the session is told."""
        now = time.monotonic()
        try:
            self._check_capacity(start.room)
            request = take(start, self._limits, now)
        except RefusedError as refusal:
            self._refuse(session, start.room, Failure(refusal.code, self._origin, refusal.cause, refusal.message))
            return
        span = self._tracer.start_span(f"{self._limits.role.value} room", context=extract_traceparent(start.traceparent))
        span.set_attributes({"baton.room": str(start.room), "baton.prompt_tokens": len(request.prompt)})
        entry = open_room(request, session, span, self._limits.role, start.waiting_timeout_ms / 1e3)
        self._rooms.add(entry)
        self._idle.clear()
        self._reaper.watch(entry.room, entry.due())
        if start.sampling.grammar:
            self._grammars.ask(start.sampling.grammar, lambda made: self._submit_held(entry, made))
        else:
            self._submit(entry)

    def abort_room(self, room: int, failure: Failure) -> None:
        """Ends a room. One whose leg here is over has failed elsewhere: that is for its trace. Unknown ones are ignored."""
        entry = self._rooms.get(room)
        if entry is None:
            if not self._ended_legs.failed(room, failure):
                self.counters["abort_unknown"] += 1
            return
        self._abort(entry, failure)

    def describe(self) -> worker_pb2.WorkerInfo:
        about = self._description
        return worker_pb2.WorkerInfo(
            instance_id=about.instance_id,
            role=ROLES[self._limits.role],
            model=about.model,
            vocab_size=self._limits.vocab_size,
            max_model_len=self._limits.max_model_len,
            fingerprint=about.fingerprint,
            bootstrap_address=about.bootstrap_address,
            load=self._load(),
            draining=self.draining,
            version=about.version,
            sampling_level=SAMPLING_LEVEL,
            takes_forks=self._limits.role is not Role.PREFILL,
        )

    def _submit(self, entry: OpenRoom[GatewaySession]) -> None:
        try:
            self._host.submit(entry.request)
        except HostStoppedError as error:
            self._end(entry, Failed(entry.room, self._engine_failure(error)), time.monotonic())

    def _submit_held(self, entry: OpenRoom[GatewaySession], made: Grammar | GrammarError) -> None:
        """The room's grammar is compiled, or cannot be: then the engine, and its pages, never hear of the room."""
        if self._rooms.get(entry.room) is not entry:
            return  # the engine was lost meanwhile, and every room with it
        failure = entry.ending
        if failure is None and isinstance(made, GrammarError):
            failure = Failure("INVALID_ARGUMENT", "client", "grammar_invalid", f"sampling.grammar cannot be compiled: {made}")
        if isinstance(made, Grammar) and failure is None:
            entry.request.sampling = replace(entry.request.sampling, grammar=made.constraint())
            self._submit(entry)
            return
        assert failure is not None
        self._end(entry, Failed(entry.room, failure), time.monotonic())
        self._on_refused(entry.room, failure)

    def _check_capacity(self, room: int) -> None:
        if self.draining:
            raise RefusedError(
                "UNAVAILABLE", "draining", f"{self._description.instance_id} is draining and takes no new rooms: choose another server"
            )
        if self._rooms.was_used(room):
            raise RefusedError("ALREADY_EXISTS", "room_used", f"room={room} was used before on this server; a room serves one request only")
        if len(self._rooms) >= self._max_rooms:
            text = f"{len(self._rooms)} rooms are open, the limit is {self._max_rooms}: send fewer at once or raise --max-rooms"
            raise RefusedError("RESOURCE_EXHAUSTED", "too_many_rooms", text)

    def _refuse(self, session: GatewaySession, room: int, failure: Failure) -> None:
        log.info("room refused", room=room, cause=failure.cause, reason=failure.message)
        self.counters[f"refused/{failure.cause}"] += 1
        wire = failure_to_wire(failure)
        wire.stage = common_pb2.ROOM_STATE_BOOTSTRAPPING
        session.event(worker_pb2.RoomEvent(room=room, failed=wire))
        if failure.cause != "room_used":
            self._on_refused(room, failure)

    def _abort(self, entry: OpenRoom[GatewaySession], failure: Failure) -> None:
        if entry.ending is not None:
            return
        entry.ending = failure
        try:
            self._host.abort(entry.room, failure)
        except HostStoppedError:
            self._end(entry, Failed(entry.room, failure), time.monotonic())

    def _tell_peers(self) -> None:
        self._on_peers(frozenset().union(*self._sessions.values()))

    # --- what the engine says -------------------------------------------------------------------------------------------------

    def _on_batch(self, batch: Batch) -> None:
        if self._reply is not None:
            self._reply.batch()
        tokens: dict[GatewaySession, list[Token]] = {}
        for event in batch.events:
            entry = self._rooms.get(event.room)
            if entry is None:
                self.counters["event_of_ended_room"] += 1
            elif isinstance(event, Token):
                tokens.setdefault(entry.owner, []).append(event)
            elif isinstance(event, PromptLogprobs):
                entry.owner.prompt_logprobs(event)
            else:
                self._on_event(entry, event, batch.at)
        for session, events in tokens.items():
            session.tokens(events)

    def _on_event(self, entry: OpenRoom[GatewaySession], event: EngineEvent, at: float) -> None:
        if ends(event):
            self._end(entry, event, at)
            return
        entry.advance(event, self._limits.role, at)
        self._reaper.watch(entry.room, entry.due())
        self._note(entry, event, at)
        entry.owner.event(event_to_wire(event, self._at_ms(entry, at)))

    def _end(self, entry: OpenRoom[GatewaySession], event: EngineEvent, at: float) -> None:
        self._note(entry, event, at)
        wire = event_to_wire(event, self._at_ms(entry, at))
        if isinstance(event, Failed):
            wire.failed.stage = entry.stage
            wire.failed.elapsed_ms = round(self._at_ms(entry, at))
            wire.failed.allowed_ms = entry.allowed_ms
            entry.span.set_status(trace.StatusCode.ERROR, event.failure.message)
            if event.failure.origin != "client":
                mark_failed(entry.span)
            self._count_failure(entry, event.failure)
        else:
            self.counters["succeeded"] += 1
            self._ended_legs.add(entry.room, entry.span)
        entry.span.end()
        entry.owner.event(wire)
        self._rooms.remove(entry.room)
        if not len(self._rooms):
            self._idle.set()

    def _count_failure(self, entry: OpenRoom[GatewaySession], failure: Failure) -> None:
        role, stage = self._limits.role, stage_name(entry.stage)
        self.counters[f"failed/{failure.origin}/{stage}/{failure.cause}"] += 1
        is_split = role is not Role.PLAIN and not entry.request.local
        peer = "none" if not is_split else "decode" if role is Role.PREFILL else "prefill"
        self._failures[FailedRoom(failure.origin, stage, failure.cause, peer, is_split)] += 1

    def _measure(self, entry: OpenRoom[GatewaySession], event: EngineEvent, at: float) -> None:
        if isinstance(event, Transferred):
            trace_transfer(self._tracer, entry.span, event.stats, at)
            if self._transfers is not None:
                self._transfers.transferred(event.stats)
        elif isinstance(event, KVReady) and self._transfers is not None:
            self._transfers.landed(event)

    def _note(self, entry: OpenRoom[GatewaySession], event: EngineEvent, at: float) -> None:
        name = type(event).__name__
        entry.span.add_event(name)
        self._measure(entry, event, at)
        if isinstance(event, Failed):
            failure = event.failure
            tell = log.info if failure.origin == "client" else log.warning
            tell(
                "room failed",
                **entry.names(),
                code=failure.code,
                origin=failure.origin,
                stage=stage_name(entry.stage),
                cause=failure.cause,
                elapsed_ms=round(self._at_ms(entry, at)),
                allowed_ms=entry.allowed_ms or entry.whole_ms,
                reason=failure.message,
            )
        else:
            log.info("room", **entry.names(), milestone=name, at_ms=round(self._at_ms(entry, at), 3))

    def _on_engine_lost(self, error: BaseException) -> None:
        now = time.monotonic()
        for entry in self._rooms.all():
            self._end(entry, Failed(entry.room, self._engine_failure(error)), now)
        self._send_load(force=True)
        self._on_lost(error)

    def _engine_failure(self, error: BaseException) -> Failure:
        text = f"the engine of {self._description.instance_id} has failed ({type(error).__name__}: {error}); its log has the trace"
        return Failure("INTERNAL", self._origin, "engine_failed", text)

    def _on_due(self, room: int) -> None:
        entry = self._rooms.get(room)
        if entry is None or entry.ending is not None:
            return
        failure = entry.expired(time.monotonic(), self._limits.role)
        if failure is None:
            return  # its limit moved; that one is being watched too
        self._abort(entry, failure)

    @staticmethod
    def _at_ms(entry: OpenRoom[GatewaySession], at: float) -> float:
        return max(0.0, (at - entry.request.arrived) * 1e3)

    # --- load -----------------------------------------------------------------------------------------------------------------

    def _load(self) -> worker_pb2.WorkerLoad:
        load = load_to_wire(self._host.stats, self._host.pulse.stalled_s(time.monotonic()))
        load.rooms = len(self._rooms)
        return load

    def _send_load(self, *, force: bool = False) -> None:
        load = self._load()
        for session in self._sessions:
            if force or session.last_load != load:
                session.load(load, self.draining)

    async def _report_load(self) -> None:
        while True:
            await asyncio.sleep(LOAD_PERIOD_S)
            self._send_load()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
    """From the engine's thread to the front's loop; the loop may be closed already when a process ends."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
