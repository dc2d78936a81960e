"""One worker as the gateway knows it: who it is, how loaded, which rooms it holds. No I/O: its session feeds it."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from baton.gateway.backlog import Backlog, Run
from baton.gateway.breaker import Breaker
from baton.gateway.errors import NotReadyError, WorkerProtocolError
from baton.gateway.held_blocks import HeldBlocks
from baton.gateway.outbox import Outbox
from baton.wire.member import MemberError, check_instance_id
from baton.wire.status import code_number
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2


class Leg(enum.Enum):
    """Which half of a room a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"


#: A plain server is the decode service in another role.
ORIGINS = {Leg.PREFILL: common_pb2.ORIGIN_PREFILL, Leg.DECODE: common_pb2.ORIGIN_DECODE, Leg.PLAIN: common_pb2.ORIGIN_DECODE}

ROLES = {Leg.PREFILL: common_pb2.ROLE_PREFILL, Leg.DECODE: common_pb2.ROLE_DECODE, Leg.PLAIN: common_pb2.ROLE_PLAIN}
_LEGS = {role: leg for leg, role in ROLES.items()}
_ROLE_NAMES: dict[int, str] = {number: name.removeprefix("ROLE_").lower() for name, number in common_pb2.Role.items()}

MAX_WAITING_STARTS = 1024


def leg_of(role: common_pb2.Role.ValueType) -> Leg:
    """What a server of that role does; KeyError for a number that is none."""
    return _LEGS[role]


class RoomSink(Protocol):
    """Who hears of a room. Called on the event loop; returns at once and does not raise."""

    def on_tokens(self, leg: Leg, first: int, tokens: list[int]) -> None: ...

    def on_logprobs(self, index: int, logprobs: inference_pb2.TokenLogprobs) -> None:
        """Of the answer's token number `index`, which comes next."""

    def on_prompt_logprobs(self, first: int, logprobs: Sequence[inference_pb2.TokenLogprobs]) -> None:
        """Of the prompt's tokens from number `first` on."""

    def on_event(self, leg: Leg, event: worker_pb2.RoomEvent) -> None: ...

    def on_lost(self, leg: Leg, failure: common_pb2.Failure) -> None: ...

    def on_silent(self, leg: Leg, failure: common_pb2.Failure) -> None: ...


class FleetListener(Protocol):
    """Who hears that a worker came, went, or changed what it can take."""

    def worker_changed(self, worker: Worker) -> None: ...


@dataclass(slots=True)
class _Held:
    sink: RoomSink
    num_tokens: int


class Worker:
    """A place in the fleet (an address and a role) and the process that is there now, if any."""

    def __init__(self, address: str, leg: Leg, *, min_vocab_size: int, stall_limit_s: float) -> None:
        self.address = address
        self.leg = leg
        self.outbox = Outbox(MAX_WAITING_STARTS)
        self.info: worker_pb2.WorkerInfo | None = None
        #: Of the process that is (or was last) there: equal exactly where the fingerprints are, field by field.
        self.fingerprint_bytes = b""
        self.load = worker_pb2.WorkerLoad()
        #: What its prefix cache holds, where it says so: of this session, for what another process holds is not known from this one's.
        self.blocks = HeldBlocks()
        self.peers: dict[str, worker_pb2.PeerState] = {}
        self.connected = False
        self.draining = False
        #: Why it goes when its rooms have ended; empty when it stays.
        self.leaving = ""
        self.problem = "not connected yet"
        self.listener: FleetListener | None = None
        self.counters: Counter[str] = Counter()
        self.breaker = Breaker()
        #: When its process last gave a sign of life (time.monotonic(), seconds), and whether that is too long ago.
        self.heard_at = 0.0
        self.silent = False
        self._min_vocab_size = min_vocab_size
        self._stall_limit_s = stall_limit_s
        self._rooms: dict[int, _Held] = {}
        self._backlog = Backlog()
        self._outstanding_tokens = 0
        self._when_empty: Callable[[Worker], None] | None = None

    # --- what it is and can take ----------------------------------------------------------------------------------------------

    @property
    def instance_id(self) -> str:
        """Of the process that is (or was last) there; empty before the first contact."""
        return self.info.instance_id if self.info else ""

    @property
    def label(self) -> str:
        """For whoever asks for answers: role and instance."""
        return f"{self.leg.value} server {self.instance_id or '?'}"

    @property
    def name(self) -> str:
        """For logs and operators: role, instance and address."""
        return f"{self.label} at {self.address}"

    @property
    def tokens_in_flight(self) -> int:
        """Its own count is up to a second old and includes other gateways' rooms; ours is exact for our rooms. The larger is surely there."""
        return max(self._outstanding_tokens, self.load.tokens_in_flight)

    @property
    def free_pages(self) -> int:
        return self.load.free_pages

    @property
    def total_pages(self) -> int:
        return self.load.total_pages

    @property
    def page_size(self) -> int:
        """Tokens of one KV page; 0 before the first contact."""
        return self.info.fingerprint.page_size if self.info else 0

    @property
    def num_rooms(self) -> int:
        """Rooms of this gateway."""
        return len(self._rooms)

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole KV pool holds."""
        return self.total_pages * self.page_size

    @property
    def unusable_because(self) -> str:
        """Why no new room may go there; empty when one may."""
        if self.leaving:
            return f"leaving: {self.leaving}"
        if not self.connected:
            return self.problem
        if self.draining:
            return "draining"
        if self.load.stalled_s > self._stall_limit_s:
            return f"its engine has made no progress for {self.load.stalled_s:.1f} s, the limit is {self._stall_limit_s:g} s"
        if not self.load.total_pages:
            return "it has not said how many KV pages it has"
        return ""

    @property
    def avoided_because(self) -> str:
        """Why others are preferred to it; empty when none are."""
        if self.silent:
            return "it gives no sign of life"
        return "its last requests failed one after the other" if self.breaker.is_open else ""

    def is_trusted(self, now: float) -> bool:
        return not self.silent and self.breaker.allows(now)

    def is_well(self, instance_id: str) -> bool:
        """Whether that very process answers here, and stays."""
        return self.connected and self.instance_id == instance_id and not self.draining and not self.silent

    def path_to(self, prefill: Worker) -> worker_pb2.PeerState:
        """How this decode server says that its pair with `prefill` is. No instance id: not connected, or to an earlier process there."""
        assert prefill.info is not None
        state = self.peers.get(prefill.info.bootstrap_address)
        if state is None:
            return worker_pb2.PeerState(problem="not connected yet")
        if state.prefill_instance_id not in ("", prefill.instance_id):
            return worker_pb2.PeerState(problem=f"still connected to {state.prefill_instance_id}")
        return state

    # --- coming and going -----------------------------------------------------------------------------------------------------

    def leave(self, reason: str, when_empty: Callable[[Worker], None]) -> None:
        """It gets no new rooms. `when_empty` is called once it has none, at once if so: unless `stay` is called before."""
        self.leaving, self._when_empty = reason, when_empty
        self._changed()
        self._note_empty()

    def stay(self) -> None:
        """It was going and is wanted again."""
        self.leaving, self._when_empty = "", None
        self._changed()

    def _note_empty(self) -> None:
        if self._when_empty is not None and not self._rooms:
            tell, self._when_empty = self._when_empty, None
            tell(self)

    # --- rooms ----------------------------------------------------------------------------------------------------------------

    def start(self, start: worker_pb2.Start, sink: RoomSink) -> None:
        """Sends a room's half there and holds its tokens as load until `release` or `abort`.

        Raises NotReadyError when the worker has gone since it was chosen, OverloadedError when it does not take its starts.
        """
        if not self.connected:
            raise NotReadyError(f"{self.name} is gone: {self.problem}")
        self.outbox.put_start(start)
        num_tokens = 0 if start.HasField("fork") else len(start.prompt_token_ids)  # a fork's are another room's
        self._rooms[start.room] = _Held(sink, num_tokens)
        self._outstanding_tokens += num_tokens

    def release(self, room: int) -> None:
        """This leg of the room is over; what the worker still says of it is counted and ignored. Idempotent."""
        held = self._rooms.pop(room, None)
        if held is not None:
            self._outstanding_tokens -= held.num_tokens
            self._note_empty()

    def abort(self, room: int, failure: common_pb2.Failure) -> None:
        """Ends the room there. Ignored when this leg is over."""
        if room in self._rooms:
            self.release(room)
            self.outbox.put_abort(room, failure)

    def tell_failed(self, room: int, failure: common_pb2.Failure) -> None:
        """A room has failed whose leg here had ended well: it may keep spans of it that are sent only then."""
        if self.connected:
            self.outbox.put_abort(room, failure)

    # --- what its session says ------------------------------------------------------------------------------------------------

    def check(self, info: worker_pb2.WorkerInfo) -> None:
        """Raises WorkerProtocolError when the process there cannot be what it was named as, with both values."""
        if info.role != ROLES[self.leg]:
            found = _ROLE_NAMES.get(info.role, str(info.role))
            raise WorkerProtocolError(
                f"{self.address} was named as a {self.leg.value} server, but {info.instance_id!r} there is a {found} server: name it with --{found}"
            )
        if not info.instance_id:
            raise WorkerProtocolError(f"the {self.leg.value} server at {self.address} has no instance id")
        try:
            check_instance_id(info.instance_id, "instance_id")
        except MemberError as error:
            raise WorkerProtocolError(f"what the {self.leg.value} server at {self.address} says of itself cannot be used: {error}") from error
        if info.vocab_size < self._min_vocab_size:
            raise WorkerProtocolError(
                f"{info.instance_id} at {self.address} has a vocabulary of {info.vocab_size} tokens, this gateway's tokenizer has "
                f"{self._min_vocab_size}: start both with the same model"
            )
        if info.max_model_len < 2 or not info.fingerprint.page_size:
            takes = f"a context of {info.max_model_len} tokens and KV pages of {info.fingerprint.page_size}"
            raise WorkerProtocolError(f"{info.instance_id} at {self.address} says that it has {takes}: nothing fits there")
        if self.leg is Leg.PREFILL and not info.bootstrap_address:
            raise WorkerProtocolError(f"prefill server {info.instance_id} at {self.address} has no bootstrap address")

    def came(self, info: worker_pb2.WorkerInfo) -> None:
        """A session with a checked process is up."""
        self.info = info
        self.fingerprint_bytes = info.fingerprint.SerializeToString(deterministic=True)
        self.load = info.load
        self.blocks = HeldBlocks()
        self.peers = {}
        self.draining = info.draining
        self.connected = True
        self.problem = ""
        self.heard(time.monotonic())
        self._changed()

    def went(self, problem: str) -> None:
        """The session is over: every room of it hears what was said before, and fails at once, whoever is at that address now."""
        while self.hand_out(len(self._backlog)):
            pass
        was_connected, self.connected, self.problem = self.connected, False, problem
        self.blocks = HeldBlocks()
        self.outbox.clear()
        rooms, self._rooms, self._outstanding_tokens = self._rooms, {}, 0
        if rooms:  # one failure, however many rooms it ended
            self.breaker.failed(time.monotonic())
        self.silent = False
        for held in rooms.values():
            held.sink.on_lost(self.leg, self._lost_failure())
        if was_connected:
            self._changed()
        self._note_empty()

    def heard(self, at: float) -> None:
        """The process gave a sign of life."""
        self.heard_at = at
        self.silent = False

    def is_silent(self, age_s: float) -> None:
        """It has given no sign of life for `age_s`: requests are sent elsewhere, and rooms that can still leave it do.

        To be said again while it lasts: a room that had nowhere to go may have somewhere now.
        """
        self.counters["silences"] += not self.silent
        self.silent = True
        failure = self._failure("silent", f"{self.name} has given no sign of life for {age_s:.1f} s")
        for held in list(self._rooms.values()):
            held.sink.on_silent(self.leg, failure)

    def _lost_failure(self) -> common_pb2.Failure:
        return self._failure("lost", f"{self.name} was lost: {self.problem}")

    def cut_off_failure(self, witness: Worker, said: str) -> common_pb2.Failure:
        """Of a room that it ended because it lost this gateway, which hears of it by way of the room's other server before it notices itself."""
        return self._failure("lost", f"{self.name} has lost its session with this gateway, as {witness.label} heard from it: {said}")

    def _failure(self, what: str, message: str) -> common_pb2.Failure:
        return common_pb2.Failure(
            code=code_number(grpc.StatusCode.UNAVAILABLE), origin=ORIGINS[self.leg], cause=f"{self.leg.value}_{what}", message=message
        )

    def take(self, report: worker_pb2.Report) -> None:
        """Keeps what a report says of rooms until `hand_out`. Raises WorkerProtocolError for a report that cannot be read."""
        if not len(report.rooms) == len(report.indexes) == len(report.tokens):
            raise WorkerProtocolError(
                f"{self.name} sent a report of {len(report.rooms)} rooms, {len(report.indexes)} indexes and {len(report.tokens)} tokens"
            )
        if report.HasField("prefix_blocks"):
            self.blocks.take(report.prefix_blocks)
        self._backlog.add(report)
        self._take_load(report)

    @property
    def num_urgent(self) -> int:
        """Rooms that wait to be told of a first token or of an event."""
        return self._backlog.num_first

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that were taken and not handed out."""
        return self._backlog.num_tokens

    def hand_out(self, num_rooms: int) -> bool:
        """Tells at most so many rooms what was said of them, the urgent ones first; whether others wait."""
        for _ in range(min(num_rooms, len(self._backlog))):
            room, words = self._backlog.take()
            for word in words:
                held = self._rooms.get(room)  # looked up each time: a word may end its room
                if isinstance(word, Run):
                    if held is None:
                        self.counters["token_of_ended_room"] += len(word.tokens)
                    else:
                        held.sink.on_tokens(self.leg, word.first, word.tokens)
                elif held is None:
                    self.counters["event_of_ended_room"] += isinstance(word, worker_pb2.RoomEvent)
                elif isinstance(word, worker_pb2.RoomPromptLogprobs):
                    held.sink.on_prompt_logprobs(word.first, word.logprobs)
                elif isinstance(word, worker_pb2.RoomLogprobs):
                    held.sink.on_logprobs(word.index, word.logprobs)
                else:
                    held.sink.on_event(self.leg, word)
        return len(self._backlog) > 0

    def _take_load(self, report: worker_pb2.Report) -> None:
        before = self.unusable_because
        if report.HasField("load"):
            self.load = report.load
        self.draining = report.draining
        if report.HasField("peers"):
            self.peers = {peer.bootstrap_address: peer for peer in report.peers.peers}
        if self.unusable_because != before or report.HasField("peers"):
            self._changed()

    def _changed(self) -> None:
        if self.listener is not None:
            self.listener.worker_changed(self)
