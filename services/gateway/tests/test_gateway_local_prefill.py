"""Which prompts decode computes itself: the rule as numbers, and what a gateway makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gateway_harness import Stack, ask, eventually
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.local_prefill import LocalPrefill, Side, judge
from baton.gateway.report import Passage
from baton.gateway.room import Event, Room
from baton.gateway.worker import Leg
from baton.wire.prefix import block_ids
from baton.wire.v1 import inference_pb2, worker_pb2

StackOf = Callable[..., Any]

IDLE = Side(0, 1000.0)


@pytest.mark.parametrize(
    ("num_tokens", "cached", "decode", "prefill", "hand_over_s", "on_decode"),
    [
        (64, 0, IDLE, IDLE, 0.01, True),  # the hand-over is what it saves
        (65, 0, IDLE, IDLE, 0.01, False),  # longer than it may be
        (1000, 936, IDLE, IDLE, 0.01, True),  # decode holds all but 64 tokens of it
        (1000, 935, IDLE, IDLE, 0.01, False),
        (64, 0, Side(100, 1000.0), IDLE, 0.01, False),  # decode has prompts of its own to compute
        (64, 0, Side(100, 1000.0), Side(200, 1000.0), 0.01, True),  # and so has prefill
        (64, 0, Side(0, 500.0), IDLE, 0.05, False),  # 128 ms there, 114 ms here
        (64, 0, Side(0, 500.0), IDLE, 0.07, True),
        (64, 0, Side(0, 0.0), IDLE, 0.0, True),  # not measured: taken to be as fast
        (64, 0, Side(1, 0.0), IDLE, 0.0, False),
        (64, 0, Side(0, 0.0), Side(0, 0.0), 0.0, True),
        (64, 0, Side(5, 0.0), Side(4, 0.0), 9.0, False),  # nothing is known but the tokens
    ],
)
def test_the_rule(num_tokens: int, cached: int, decode: Side, prefill: Side, hand_over_s: float, on_decode: bool) -> None:
    decode = replace(decode, cached_tokens=cached)
    assert judge(num_tokens, max_tokens=64, decode=decode, prefill=prefill, hand_over_s=hand_over_s).on_decode is on_decode


@pytest.mark.parametrize(("cached_on_prefill", "on_decode"), [(0, True), (950, True), (976, False)])
def test_what_prefill_holds_makes_it_more_attractive(cached_on_prefill: int, on_decode: bool) -> None:
    """Of 1,000 tokens decode holds all but 64: 64 ms there, and what prefill lacks with a hand-over of 30 ms here."""
    sides = {"decode": Side(0, 1000.0, 936), "prefill": Side(0, 1000.0, cached_on_prefill)}
    assert judge(1000, max_tokens=64, hand_over_s=0.03, **sides).on_decode is on_decode


@given(st.integers(1, 10_000), st.builds(Side, st.integers(0, 10_000), st.floats(0, 1e6)), st.floats(0, 10))
def test_it_is_off_unless_it_was_asked_for(num_tokens: int, prefill: Side, hand_over_s: float) -> None:
    assert not judge(num_tokens, max_tokens=0, decode=Side(0, 1000.0, num_tokens), prefill=prefill, hand_over_s=hand_over_s).on_decode


@given(st.integers(1, 64), st.integers(0, 500), st.integers(0, 500), st.floats(0, 1))
def test_more_to_wait_for_never_makes_a_server_more_attractive(num_tokens: int, pending: int, more: int, hand_over_s: float) -> None:
    def on_decode(decode_pending: int, prefill_pending: int) -> bool:
        sides = {"decode": Side(decode_pending, 900.0), "prefill": Side(prefill_pending, 1100.0)}
        return judge(num_tokens, max_tokens=64, hand_over_s=hand_over_s, **sides).on_decode

    assert on_decode(pending, pending) or not on_decode(pending + more, pending)
    assert not on_decode(pending, pending) or on_decode(pending, pending + more)


def test_the_hand_over_is_what_finished_rooms_took() -> None:
    rule = LocalPrefill(64)
    machine = Room.split(10.0)
    machine.apply(Event.BOOTSTRAPPED, 10.25)
    rule.note(machine, Passage(10.0))
    assert rule.hand_over_s == 0.0  # it never came to a transfer
    passage = Passage(10.0, transfer=inference_pb2.TransferReport(exposed_ms=50), exposed_ms=250.0)
    rule.note(machine, passage)
    assert rule.hand_over_s == pytest.approx(0.5)
    machine = Room.split(10.0)
    machine.apply(Event.BOOTSTRAPPED, 11.25)
    rule.note(machine, passage)
    assert rule.hand_over_s == pytest.approx(0.6)


async def test_a_short_prompt_is_prefilled_on_decode_and_counted(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(local_prefill_max_tokens=8)
    reply = await stack.reply(ask("hello"))
    assert reply.text == "the answer is forty two"
    assert reply.states == ["BOOTSTRAPPING", "WAITING", "SUCCESS"]
    report = reply.last.report
    assert report.prefilled_on_decode
    assert (report.prefill_instance, report.decode_instance) == ("decode-0", "decode-0")
    assert not report.HasField("transfer")
    assert stack.decode.starts[0].HasField("local")
    assert not stack.prefill.starts
    long = await stack.reply(ask("hello " * 20))
    assert long.text == reply.text
    assert long.states == ["BOOTSTRAPPING", "WAITING", "TRANSFERRING", "SUCCESS"]
    assert not long.last.report.prefilled_on_decode
    assert stack.gateway.rooms.counters["prefilled_on_decode"] == 1
    await stack.settled()


async def test_a_long_prompt_that_decode_says_it_holds_is_short(stack_of: StackOf) -> None:
    """A chat's next turn: all but its last words lie on decode."""
    stack: Stack = await stack_of(local_prefill_max_tokens=8, routing="prefix-aware")
    prompt = [100 + number for number in range(3 * 16 + 5)]
    request = ask(token_ids=inference_pb2.TokenIds(ids=prompt), text=None)
    assert not (await stack.reply(request)).last.report.prefilled_on_decode
    key = stack.decode.attached[0].prefix_key
    blocks = block_ids(key, "", prompt, 16, 100)
    assert len(blocks) == 3
    decode = next(worker for worker in stack.gateway.fleet.workers if worker.leg is Leg.DECODE)

    async def told(**said: Any) -> None:
        stack.decode.report(worker_pb2.Report(prefix_blocks=worker_pb2.PrefixBlocks(**said)))
        await eventually(lambda: len(decode.blocks) == len(said["stored"]))

    await told(reset=True, stored=blocks[:2])
    assert not (await stack.reply(request)).last.report.prefilled_on_decode  # 21 tokens are missing
    await told(reset=True, stored=blocks)
    assert (await stack.reply(request)).last.report.prefilled_on_decode  # 5 are
    await told(reset=True, stored=[])
    assert not (await stack.reply(request)).last.report.prefilled_on_decode
    await stack.settled()


async def test_off_means_never(stack_of: StackOf) -> None:
    stack: Stack = await stack_of()
    assert not (await stack.reply(ask("x"))).last.report.prefilled_on_decode
    assert stack.prefill.starts
    assert not stack.gateway.rooms.counters["prefilled_on_decode"]


async def test_a_decode_server_with_prompts_of_its_own_is_spared(stack_of: StackOf) -> None:
    stack: Stack = await stack_of(local_prefill_max_tokens=64)
    stack.decode.report_load(pending_prompt_tokens=5000, prompt_tokens_per_s=1000.0)
    stack.prefill.report_load(prompt_tokens_per_s=1000.0)
    workers = {worker.leg.value: worker for worker in stack.gateway.fleet.workers}
    await eventually(lambda: workers["decode"].load.pending_prompt_tokens == 5000 and workers["prefill"].load.prompt_tokens_per_s > 0)
    assert not (await stack.reply()).last.report.prefilled_on_decode
    stack.decode.report_load(prompt_tokens_per_s=1000.0)
    await eventually(lambda: not workers["decode"].load.pending_prompt_tokens)
    assert (await stack.reply()).last.report.prefilled_on_decode
