"""A worker's front: gateway sessions on one side, the engine's host on the other. Lives on one event loop; nothing here blocks it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from opentelemetry import trace

from baton.engine.grammar import Grammar, GrammarError, Grammars
from baton.engine.types import EngineEvent, Failed, Failure, PromptLogprobs, Role, Token
from baton.servicekit import Metrics, extract_traceparent, get_logger
from baton.wire.status import log_reason
from baton.wire.v1 import common_pb2, worker_pb2
from baton.workerkit.convert import ROLES, event_to_wire, failure_to_wire
from baton.workerkit.errors import HostStoppedError, RefusedError
from baton.workerkit.gateways import Gateways
from baton.workerkit.grammar_desk import GrammarDesk, no_grammar
from baton.workerkit.host import Batch, EngineHost
from baton.workerkit.intake import SAMPLING_LEVEL, Limits, take
from baton.workerkit.load_reports import LoadReports
from baton.workerkit.metrics import ReplyTime, TransferMetrics, observe_engine, observe_front
from baton.workerkit.reaper import Reaper
from baton.workerkit.room_notes import RoomNotes, at_ms
from baton.workerkit.rooms import OpenRoom, RoomTable, ends, open_room
from baton.workerkit.session import GatewaySession

log = get_logger(__name__)

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
        self._on_refused = on_refused or (lambda room, failure: None)
        self._on_lost = on_lost or (lambda error: None)
        self._origin = "decode" if limits.role is Role.PLAIN else limits.role.value
        self._rooms: RoomTable[GatewaySession] = RoomTable()
        self._reaper = Reaper(self._on_due)
        self._gateways = Gateways(on_peers or (lambda addresses: None))
        self._idle = asyncio.Event()
        self._idle.set()
        self._loads = LoadReports(host, lambda: len(self._rooms), self._gateways)
        self._drain_begun = asyncio.Event()
        self.counters: Counter[str] = Counter()
        measured = metrics if metrics is not None and metrics.enabled else None
        self._notes = RoomNotes(limits.role, tracer, self.counters, None if measured is None else TransferMetrics(measured, limits.role))
        self._reply = None if measured is None else ReplyTime(measured)
        if measured is not None:
            observe_engine(measured, host, limits.role)
            observe_front(measured, self.counters, self._notes.failures, lambda: len(self._rooms))

    @property
    def draining(self) -> bool:
        """Refuses every Start."""
        return self._loads.draining

    # --- life -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the engine's thread and the load reports. Call on the event loop."""
        loop = asyncio.get_running_loop()
        self._host.start(
            lambda batch: _call_soon(loop, self._on_batch, batch),
            lambda error: _call_soon(loop, self._on_engine_lost, error),
        )
        self._loads.start()

    def drain(self) -> None:
        """Refuses every Start from now on; what runs goes on. Idempotent."""
        if not self.draining:
            self._loads.draining = True
            self._drain_begun.set()
            log.info("draining", rooms=len(self._rooms))
            self._loads.send(force=True)

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
        self._gateways.end()

    async def close(self) -> None:
        """Stops the timers and the engine's thread. Rooms must be over, or they are dropped."""
        self._reaper.close()
        self._grammars.close()
        self._loads.close()
        await asyncio.to_thread(self._host.stop)

    def peers_changed(self, states: worker_pb2.PeerStates) -> None:
        """Tells every gateway how the pairs with this worker are (decode only)."""
        self._gateways.tell_pairs(states)

    # --- what gateways ask ----------------------------------------------------------------------------------------------------

    def attach(self, session: GatewaySession) -> None:
        self._loads.send_to(session)
        self._gateways.add(session)
        log.info("gateway attached", gateway_id=session.gateway_id, gateway_address=session.gateway_address)

    def detach(self, session: GatewaySession) -> None:
        """The session is over: its rooms are ended, its peers forgotten."""
        rooms = self._rooms.of(session)
        log.info("gateway gone", gateway_id=session.gateway_id, rooms=len(rooms))
        for entry in rooms:
            message = f"the session of gateway {session.gateway_id} ended while room {entry.room} was open"
            self._abort(entry, Failure("UNAVAILABLE", "gateway", "gateway_lost", message))
        self._gateways.remove(session)

    def set_peers(self, session: GatewaySession, addresses: Sequence[str]) -> None:
        self._gateways.name_peers(session, addresses)

    def gateway_address(self) -> str:
        """Where clients should go, as the gateway that attached last says; empty when none is attached."""
        return self._gateways.newest_address()

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
            self._notes.failed_elsewhere(room, failure)
        else:
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
            load=self._loads.now(),
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

    def _submit_held(self, entry: OpenRoom[GatewaySession], made: Grammar | GrammarError | RuntimeError) -> None:
        """The room's grammar is compiled, or cannot be: then the engine, and its pages, never hear of the room."""
        if self._rooms.get(entry.room) is not entry:
            return  # the engine was lost meanwhile, and every room with it
        failure = entry.ending
        if isinstance(made, Grammar) and failure is None:
            entry.request.sampling = replace(entry.request.sampling, grammar=made.constraint())
            self._submit(entry)
            return
        if failure is None:
            assert not isinstance(made, Grammar)
            failure = no_grammar(made, self._origin)
        self._end(entry, Failed(entry.room, failure), time.monotonic())
        # The other half needs to know that it ended, not what the grammar says.
        self._on_refused(entry.room, replace(failure, message=log_reason(failure.cause, failure.message)))

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
        self._notes.refused(room, failure)
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

    # --- what the engine says -------------------------------------------------------------------------------------------------

    def _on_batch(self, batch: Batch) -> None:
        if self._reply is not None:
            self._reply.batch()
        tokens: defaultdict[GatewaySession, list[Token]] = defaultdict(list)
        find = self._rooms.get
        for event in batch.events:
            entry = find(event.room)
            if entry is None:
                self.counters["event_of_ended_room"] += 1
            elif type(event) is Token:
                tokens[entry.owner].append(event)
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
        self._notes.milestone(entry, event, at)
        entry.owner.event(event_to_wire(event, at_ms(entry, at)))

    def _end(self, entry: OpenRoom[GatewaySession], event: EngineEvent, at: float) -> None:
        wire = event_to_wire(event, at_ms(entry, at))
        if isinstance(event, Failed):
            wire.failed.stage = entry.stage
            wire.failed.elapsed_ms = round(at_ms(entry, at))
            wire.failed.allowed_ms = entry.allowed_ms
            self._notes.failed(entry, event, at)
        else:
            self._notes.succeeded(entry, event, at)
        entry.owner.event(wire)
        self._rooms.remove(entry.room)
        if not len(self._rooms):
            self._idle.set()

    def _on_engine_lost(self, error: BaseException) -> None:
        now = time.monotonic()
        for entry in self._rooms.all():
            self._end(entry, Failed(entry.room, self._engine_failure(error)), now)
        self._loads.send(force=True)
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


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
    """From the engine's thread to the front's loop; the loop may be closed already when a process ends."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
