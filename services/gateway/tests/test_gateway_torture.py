"""Random inputs: in whatever order things happen, a room ends once and on both sides; whatever a body holds, it is parsed or refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN

from baton.gateway.errors import RequestError, RoomFailedError
from baton.gateway.http.body import parse_json_object
from baton.gateway.http.parse import ParsedBody, parse_chat, parse_completion
from baton.gateway.live_room import LiveRoom
from baton.gateway.report import Passage, room_report
from baton.gateway.room import State
from baton.gateway.room_clock import Timeouts
from baton.gateway.worker import Leg, Worker
from baton.servicekit import get_logger
from baton.wire.v1 import common_pb2, inference_pb2, worker_pb2

ROOM = 77
ANSWER = [11, 12, 13, 14]

PREFILL_SAYS = ["bootstrapped", "prefill_started", "transfer_started", "transferred", "failed"]
DECODE_SAYS = ["reserved", "kv_ready", "finished", "failed"]

STEPS = st.one_of(
    st.tuples(st.just("prefill"), st.sampled_from(PREFILL_SAYS)),
    st.tuples(st.just("decode"), st.sampled_from(DECODE_SAYS)),
    st.tuples(st.just("token"), st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(0, 3))),
    st.tuples(st.just("wrong token"), st.just(("decode", 1))),
    st.tuples(st.just("lose"), st.sampled_from(["prefill", "decode"])),
    st.tuples(st.just("cancel"), st.none()),
    st.tuples(st.just("stop string"), st.none()),
    st.tuples(st.just("deadline"), st.none()),
)

#: One that goes well, for the shrinker to start from.
GOOD = [
    ("decode", "reserved"),
    ("prefill", "bootstrapped"),
    ("prefill", "transfer_started"),
    ("token", ("prefill", 0)),
    ("prefill", "transferred"),
    ("decode", "kv_ready"),
    *(("token", ("decode", index)) for index in (1, 2, 3)),
    ("decode", "finished"),
]


def make_worker(leg: Leg) -> Worker:
    worker = Worker("127.0.0.1:1", leg, min_vocab_size=1, stall_limit_s=30)
    worker.came(worker_pb2.WorkerInfo(instance_id=leg.value, load=worker_pb2.WorkerLoad(total_pages=10)))
    return worker


class Rig:
    """A live room between two workers that exist only as their gateway's half."""

    def __init__(self) -> None:
        self.workers = {"prefill": make_worker(Leg.PREFILL), "decode": make_worker(Leg.DECODE)}
        self.closed = 0
        start = worker_pb2.Start(room=ROOM, prompt_token_ids=[1, 2, 3], sampling=worker_pb2.Sampling(max_tokens=4))
        now = time.monotonic()
        self.room = LiveRoom(
            ROOM,
            [(worker, start) for worker in self.workers.values()],
            passage=Passage(now),
            timeouts=Timeouts(100, 100, 100),
            deadline=now + 100,
            max_buffered=100,
            log=get_logger("torture"),
            span=INVALID_SPAN,
            on_closed=self._on_closed,
        )
        self.room.begin()

    def _on_closed(self, room: LiveRoom) -> None:
        self.closed += 1

    def step(self, kind: str, what: Any) -> None:
        if kind in self.workers:
            event = worker_pb2.RoomEvent(room=ROOM)
            getattr(event, what).SetInParent()
            if what == "finished":
                event.finished.reason, event.finished.completion_tokens = common_pb2.FINISH_REASON_LENGTH, len(ANSWER)
            self._say(kind, worker_pb2.Report(events=[event]))
        elif kind == "token":
            who, index = what
            self._say(who, worker_pb2.Report(rooms=[ROOM], indexes=[index], tokens=[ANSWER[index]]))
        elif kind == "wrong token":
            self._say(what[0], worker_pb2.Report(rooms=[ROOM], indexes=[what[1]], tokens=[999]))
        elif kind == "lose":
            self.workers[what].went("as scripted")
        elif kind == "cancel":
            self.room.cancel(common_pb2.Failure(code=1, origin=common_pb2.ORIGIN_CLIENT, cause="client_gone"))
        elif kind == "stop string":
            self.room.answered("stop_string")
        else:
            self.room._on_deadline()

    def _say(self, who: str, report: worker_pb2.Report) -> None:
        self.workers[who].take(report)
        while self.workers[who].hand_out(1):
            pass

    async def outcome(self) -> tuple[list[int], str]:
        """What the client got, and how it ended; "open" if it would still wait."""
        tokens: list[int] = []
        try:
            while True:
                async with asyncio.timeout(0.001):
                    batch = await self.room.answer.stream.take()
                if not batch:
                    return tokens, "answered"
                tokens += batch
        except TimeoutError:
            return tokens, "open"
        except RoomFailedError as error:
            return tokens, error.cause

    async def aborted(self, name: str) -> int:
        """How many aborts or unsent starts this worker's outbox holds."""
        num_aborts = 0
        while True:
            try:
                async with asyncio.timeout(0):
                    command = await self.workers[name].outbox.take()
            except TimeoutError:
                return num_aborts
            num_aborts += command.WhichOneof("command") == "abort"


@settings(max_examples=400)
@given(st.lists(STEPS, max_size=25))
@example(GOOD)
@example([*GOOD[:5], ("lose", "prefill"), *GOOD[5:]])
def test_a_room_ends_once_on_both_sides_whatever_happens(steps: list[tuple[str, Any]]) -> None:
    async def play() -> None:
        rig = Rig()
        for name in rig.workers:
            await rig.aborted(name)  # the starts are sent
        held = {"prefill": True, "decode": True}
        before = State.BOOTSTRAPPING
        for kind, what in steps:
            rig.step(kind, what)
            state = rig.room.machine.state
            assert not (before is State.SUCCESS and state is not State.SUCCESS)
            assert not (before is State.FAILED and state is not State.FAILED)
            before = state
            for name, worker in rig.workers.items():
                assert worker.num_rooms == (worker.leg in rig.room._legs)
                assert worker._outstanding_tokens == 3 * worker.num_rooms
                assert held[name] or worker.num_rooms == 0  # a leg that is over stays over
                held[name] = worker.num_rooms == 1
        tokens, how = await rig.outcome()
        assert rig.closed == (0 if rig.room._legs or how == "open" else 1)
        kinds = {kind for kind, _ in steps}
        if "wrong token" not in kinds:  # where it comes first, nobody can know better
            assert tokens == ANSWER[: len(tokens)]
            assert how != "answered" or tokens == ANSWER or "stop string" in kinds
        for name in rig.workers:
            assert await rig.aborted(name) <= 1
        report = room_report(ROOM, rig.room.machine, rig.room.passage, inference_pb2.Usage(), time.monotonic())
        assert all(span.duration_ms >= 0 for span in report.states)
        # the end of the world ends every room
        rig.step("cancel", None)
        for name in rig.workers:
            rig.step("lose", name)
        assert rig.closed == 1
        assert all(worker.num_rooms == 0 and worker._outstanding_tokens == 0 for worker in rig.workers.values())
        assert rig.room._clock._state_timer is None
        assert rig.room._clock._deadline_timer is None
        _, how = await rig.outcome()
        assert how != "open"

    asyncio.run(play())


def test_the_good_example_is_good() -> None:
    async def play() -> None:
        rig = Rig()
        for kind, what in GOOD:
            rig.step(kind, what)
        assert await rig.outcome() == (ANSWER, "answered")
        assert rig.closed == 1

    asyncio.run(play())


# --- bodies

FIELDS = [
    "model",
    "messages",
    "prompt",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "tools",
    "tool_choice",
    "response_format",
    "logit_bias",
    "presence_penalty",
    "user",
    "metadata",
    "request_id",
    "include_usage",
    "role",
    "content",
    "type",
    "text",
    "unknown",
]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**400), max_value=10**400),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["user", "text", "tiny"]),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5))


JSON = st.recursive(SCALARS, nested, max_leaves=12)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": JSON}) | JSON, max_size=3)


def refusal(parse: Callable[[Any], Any], given: Any, expected: type) -> str | None:
    """What a body is refused with; None when it was taken."""
    try:
        assert isinstance(parse(given), expected)
    except RequestError as error:
        return str(error)
    return None


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8), MESSAGES, st.booleans())
def test_any_object_is_parsed_or_refused(body: dict[str, Any], messages: Any, sound: bool) -> None:
    if sound:  # so that later fields are reached too
        body = body | {"model": "tiny", "messages": messages}
    for parse in (parse_chat, parse_completion):
        text = refusal(parse, body, ParsedBody)
        assert text is None or 0 < len(text) < 1000


@settings(max_examples=400)
@given(st.one_of(st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode())))
@example(b"")
@example(b"\xef\xbb\xbf{}")
@example(b'{"a": 1e999}')
@example(b'{"a": "\\ud800"}')
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    assert refusal(parse_json_object, raw, dict) != ""
