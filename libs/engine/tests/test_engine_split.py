"""Prefill and decode engines joined in memory: the split says what a plain engine says, and every page comes back."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from engine_pair import Pair, legs
from engine_reference import CANCEL, answers, ends, engine, prompts, request, run

from baton.engine import Engine, Failure, Role
from baton.engine.types import (
    Bootstrapped,
    Failed,
    Finished,
    KVReady,
    PrefillStarted,
    Reserved,
    Token,
    Transferred,
    TransferStarted,
)

LOST = Failure("UNAVAILABLE", "prefill", "prefill_lost", "the prefill server is gone")


@pytest.mark.parametrize(("page_size", "budget"), [(4, 64), (16, 512), (4, 9)])
def test_split_is_plain(tiny, page_size, budget):
    asked = dict(enumerate(prompts([1, 3, 4, 5, 16, 17, 33, 64, 90]), start=1))
    expected = {room: tiny.greedy(prompt, 20) for room, prompt in asked.items()}
    pair = Pair(tiny.ours, 256 // page_size, 512 // page_size, page_size=page_size, max_num_batched_tokens=budget)
    pair.add(*(request(room, prompt, max_tokens=20) for room, prompt in asked.items()))
    events = pair.run()
    assert legs(events) == expected
    pair.assert_clean()


def test_split_samples_what_plain_samples(tiny):
    asked = dict(enumerate(prompts([9, 30, 50], seed=3), start=1))
    plain = engine(tiny.ours)
    pair = Pair(tiny.ours)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=25, temperature=1.2, top_k=40, seed=77 + room))
        pair.add(request(room, prompt, max_tokens=25, temperature=1.2, top_k=40, seed=77 + room))
    assert legs(pair.run()) == answers(run(plain))
    pair.assert_clean()


def test_milestones_do_not_wait_for_the_forward_pass(tiny):
    """A prompt of one chunk: what is known before its pass, and the first write between its layers, are told before its token is drawn."""
    pair = Pair(tiny.ours)
    told = []
    pair.prefill.on_milestones(told.extend)
    pair.add(request(1, prompts([40])[0], max_tokens=2))
    returned = []
    while not any(isinstance(event, Token) for event in returned):
        pair.decode.step()
        returned = pair.prefill.step()
    assert [type(event) for event in told] == [Bootstrapped, PrefillStarted, TransferStarted]
    assert not {type(event) for event in returned} & {Bootstrapped, PrefillStarted, TransferStarted}
    pair.run()
    pair.assert_clean()


def test_milestones_of_both_legs_come_in_order(tiny):
    pair = Pair(tiny.ours)
    pair.add(request(1, prompts([10])[0], max_tokens=3))
    first, second = [], []
    while not (second and isinstance(second[-1], Finished)):
        first += pair.prefill.step()
        second += pair.decode.step()
    first += pair.prefill.step()
    assert [type(event) for event in first] == [Bootstrapped, PrefillStarted, TransferStarted, Token, Transferred]
    assert [type(event) for event in second] == [Reserved, KVReady, Token, Token, Finished]
    assert [event.index for event in second if isinstance(event, Token)] == [1, 2]
    stats = first[-1].stats
    assert stats.num_bytes == 3 * 4 * pair.decode.layout.token_bytes
    assert second[0].num_pages == 3
    pair.assert_clean()


def test_layers_are_handed_over_in_whole_pages_chunk_by_chunk(tiny):
    pair = Pair(tiny.ours, max_num_batched_tokens=10)
    pair.add(request(7, prompts([26])[0], max_tokens=1))
    pair.run()
    chunks = [
        [(page, count) for _, _, page, count in group] for _, group in itertools.groupby(pair.link.layers_handed_over, key=lambda each: each[2])
    ]
    assert chunks == [[(0, 2)] * 3, [(2, 3)] * 3, [(5, 2)] * 3]
    pair.assert_clean()


def test_a_resident_prefix_is_computed_but_not_sent(tiny):
    pair = Pair(tiny.ours, max_num_batched_tokens=10)
    original = pair.link.importer.publish
    pair.link.importer.publish = lambda request, reservation: original(request, replace(reservation, resident_tokens=12))
    pair.prefill.add(request(1, prompts([26])[0]))
    pair.decode.add(request(1, prompts([26])[0], max_tokens=1))
    pair.run()
    assert sorted({(page, count) for _, _, page, count in pair.link.layers_handed_over}) == [(3, 2), (5, 2)]
    pair.assert_clean()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_short_answers_end_on_decode(tiny, max_tokens):
    pair = Pair(tiny.ours)
    pair.add(request(1, prompts([10])[0], max_tokens=max_tokens))
    events = pair.run()
    assert ends(events)[1] == Finished(1, ends(events)[1].reason, max_tokens)
    pair.assert_clean()


def test_an_idle_prefill_computes_one_prompt_before_it_is_published_and_says_nothing(tiny):
    pair = Pair(tiny.ours)
    first, second = prompts([10, 12])
    pair.prefill.add(request(1, first, max_tokens=3))
    pair.prefill.add(request(2, second, max_tokens=3))
    assert run(pair.prefill) == []
    assert pair.prefill.stats().waiting == 1  # the second waits: no more than one is computed for nothing
    assert pair.prefill.stats().free_pages == 64 - 3
    pair.decode.add(request(1, first, max_tokens=3))
    pair.decode.add(request(2, second, max_tokens=3))
    assert legs(pair.run()) == {1: tiny.greedy(first, 3), 2: tiny.greedy(second, 3)}
    pair.assert_clean()


def test_what_was_computed_early_makes_room_for_what_is_published(tiny):
    """An early prompt takes a quarter of the free pages at most; a larger one waits until it is published."""
    pair = Pair(tiny.ours, 16, 64)
    large, small = prompts([20, 16])
    pair.prefill.add(request(1, large, max_tokens=2))
    assert run(pair.prefill) == []
    assert pair.prefill.stats().free_pages == 16
    pair.prefill.abort(1, CANCEL)
    pair.prefill.add(request(2, small, max_tokens=2))
    ended = run(pair.prefill)
    assert [type(event) for event in ended] == [Failed]
    assert pair.prefill.stats().free_pages == 16 - 4
    pair.add(request(3, prompts([48])[0], max_tokens=2))  # all pages that are left
    assert legs(pair.run())[3] == tiny.greedy(prompts([48])[0], 2)
    pair.prefill.abort(2, CANCEL)
    pair.run()
    pair.assert_clean()


def test_priority_decides_who_is_computed_early_and_who_is_next(tiny):
    """Three rooms that came together: the one of the lowest priority first on both sides, then as they came."""
    pair = Pair(tiny.ours, max_running=1)
    asked = [
        replace(request(room, prompt, max_tokens=3), priority=priority)
        for room, prompt, priority in zip((1, 2, 3), prompts([9] * 3), (0, 0, -1), strict=True)
    ]
    for each in asked:
        pair.prefill.add(each)
    run(pair.prefill)
    for each in asked:
        pair.decode.add(each)
    events = pair.run()
    assert [event.room for event in events if isinstance(event, Transferred)] == [3, 1, 2]
    assert [event.room for event in events if isinstance(event, Finished)] == [3, 1, 2]
    pair.assert_clean()


def test_decode_retracts_recomputes_and_continues(tiny):
    asked = dict(enumerate(prompts([20, 21, 22, 23], seed=6), start=1))
    expected = {room: tiny.greedy(prompt, 40) for room, prompt in asked.items()}
    pair = Pair(tiny.ours, 64, 36, growth_tokens=4)
    pair.add(*(request(room, prompt, max_tokens=40) for room, prompt in asked.items()))
    events = pair.run()
    assert legs(events) == expected
    assert pair.decode.stats().extra["retractions"] >= 1
    pair.assert_clean()


def test_a_prompt_computed_on_decode_gives_what_a_split_one_gives(tiny):
    """Beside landed ones, in small chunks, with pages so short that some are retracted."""
    asked = dict(enumerate(prompts([20, 50, 22, 40, 1], seed=6), start=1))
    expected = {room: tiny.greedy(prompt, 40) for room, prompt in asked.items()}
    pair = Pair(tiny.ours, 64, 44, growth_tokens=4, mixed_prompt_tokens=5)
    for room, prompt in asked.items():
        if room % 2:
            pair.add(request(room, prompt, max_tokens=40))
        else:
            pair.decode.add(replace(request(room, prompt, max_tokens=40), local=True))
    events = pair.run()
    assert legs(events) == expected
    assert [type(event) for event in events if event.room == 2 and not isinstance(event, Token)] == [Reserved, PrefillStarted, Finished]
    stats = pair.decode.stats()
    assert stats.extra["local_prefills"] == 2
    assert stats.extra["retractions"] >= 1
    assert stats.extra["prompt_tokens_per_s"] > 0
    pair.assert_clean()


@pytest.mark.parametrize("local", [False, True], ids=["split", "on-decode"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 11}, {"temperature": 1.3, "seed": 5, "top_p": 0.9}])
def test_an_answer_goes_on_behind_any_of_its_tokens(tiny, sampling, local):
    """What another server is given when one dies: prompt and answer so far, and what is left of max_tokens and min_tokens."""
    num_tokens, min_tokens = 24, 10
    (prompt,) = prompts([17], seed=12)
    plain = engine(tiny.ours)
    asked = {"max_tokens": num_tokens, "min_tokens": min_tokens, "stop_token_ids": frozenset(range(40)), **sampling}
    plain.add(request(1, prompt, **asked))
    (whole,) = answers(run(plain)).values()
    for had in range(1, len(whole)):
        pair = Pair(tiny.ours)
        left = asked | {"max_tokens": num_tokens - had, "min_tokens": max(0, min_tokens - had)}
        again = request(1, [*prompt, *whole[:had]], **left)
        if local:
            pair.decode.add(replace(again, local=True))
        else:
            pair.add(again)
        assert [*whole[:had], *legs(pair.run())[1]] == whole
        pair.assert_clean()


def test_prefill_serves_more_prompts_than_its_pool_holds(tiny):
    asked = dict(enumerate(prompts([40] * 12, seed=8), start=1))
    expected = {room: tiny.greedy(prompt, 6) for room, prompt in asked.items()}
    pair = Pair(tiny.ours, 12, 64)
    pair.add(*(request(room, prompt, max_tokens=6) for room, prompt in asked.items()))
    assert legs(pair.run()) == expected
    pair.assert_clean()


STAGES = range(8)


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_at_any_stage_gives_everything_back_and_harms_nobody(tiny, side, stage):
    asked = dict(enumerate(prompts([30, 30, 30], seed=9), start=1))
    expected = {room: tiny.greedy(prompt, 12) for room, prompt in asked.items()}
    pair = Pair(tiny.ours, max_num_batched_tokens=16)
    pair.add(*(request(room, prompt, max_tokens=12) for room, prompt in asked.items()))
    events = [event for _ in range(stage) for each in (pair.prefill, pair.decode) for event in each.step()]
    for each in {"prefill": [pair.prefill], "decode": [pair.decode], "both": [pair.prefill, pair.decode]}[side]:
        each.abort(2, CANCEL)
    events += pair.run()
    # What a gateway does when one leg has failed: nobody else tells prefill of a room that decode never published.
    pair.prefill.abort(2, CANCEL)
    pair.decode.abort(2, CANCEL)
    events += pair.run()
    found = legs(events)
    assert {room: found[room] for room in (1, 3)} == {room: expected[room] for room in (1, 3)}
    assert found.get(2, []) == expected[2][: len(found.get(2, []))]
    pair.assert_clean()


def test_aborted_pages_stay_until_the_writer_is_quiet(tiny):
    pair = Pair(tiny.ours)
    pair.add(request(1, prompts([30])[0], max_tokens=4))
    pair.decode.step()
    pair.link.hold()
    pair.decode.abort(1, CANCEL)
    assert run(pair.decode) == [Reserved(1, 8, 0), Failed(1, CANCEL)] or pair.decode.stats().rooms == 1
    stats = pair.decode.stats()
    assert (stats.free_pages, stats.published_pages, stats.quarantined_pages) == (56, 8, 0)
    pair.link.importer.quarantined = 8
    stats = pair.decode.stats()
    assert (stats.free_pages, stats.published_pages, stats.quarantined_pages) == (56, 0, 8)
    pair.link.release()
    pair.run()
    pair.assert_clean()


def test_source_pages_stay_until_the_exporter_is_done_with_them(tiny):
    pair = Pair(tiny.ours, max_num_batched_tokens=16)
    pair.add(request(1, prompts([30])[0], max_tokens=4))
    pair.decode.step()
    pair.prefill.step()
    pair.link.hold()
    pair.prefill.abort(1, CANCEL)
    assert Failed(1, CANCEL) in pair.prefill.step()
    assert pair.prefill.stats().free_pages == 56
    assert not pair.prefill.has_work()
    pair.link.release()
    events = pair.run()
    assert ends(events)[1] == Failed(1, CANCEL), "decode is told by the negative acknowledgement"
    pair.assert_clean()


def test_a_prompt_too_long_for_prefill_is_told_to_decode(tiny):
    pair = Pair(tiny.ours, 4, 64)
    pair.add(request(1, prompts([17])[0], max_tokens=4))
    first, second = [], []
    for _ in range(4):
        first += pair.prefill.step()
        second += pair.decode.step()
    (refused,) = first
    assert refused.failure.code == "INVALID_ARGUMENT"
    assert "17 tokens" in refused.failure.message
    assert "at most 16" in refused.failure.message
    assert ends(second)[1] == refused
    pair.assert_clean()


def test_a_peer_lost_in_mid_transfer_fails_the_room_on_both_sides(tiny):
    pair = Pair(tiny.ours, max_num_batched_tokens=16)
    pair.add(request(1, prompts([30])[0], max_tokens=4))
    events = pair.decode.step() + pair.prefill.step()
    pair.link.end_sending(1, LOST)
    events = [*events, *pair.prefill.step(), *pair.decode.step()]
    assert [event for event in events if isinstance(event, Failed)] == [Failed(1, LOST), Failed(1, LOST)]
    pair.run()
    pair.assert_clean()


def test_a_landing_that_races_with_an_abort_gives_the_pages_back(tiny):
    pair = Pair(tiny.ours)
    pair.add(request(1, prompts([30])[0], max_tokens=4))
    pair.decode.step()
    pair.prefill.step()
    pair.prefill.step()
    assert pair.link.importer.events, "the doorbell has rung, decode has not looked yet"
    pair.decode.abort(1, CANCEL)
    events = pair.run()
    assert [event for event in events if isinstance(event, (Finished, Failed))] == [Failed(1, CANCEL)]
    pair.assert_clean()


def test_bootstrap_and_waiting_clocks(tiny):
    pair = Pair(tiny.ours)
    pair.prefill.add(request(1, prompts([10])[0], bootstrap_deadline=10.0, waiting_deadline=20.0))
    pair.prefill.reap(9.9)
    assert pair.prefill.step() == []
    pair.prefill.reap(10.0)
    (late,) = pair.prefill.step()
    assert (late.failure.code, late.failure.origin, late.failure.cause) == ("DEADLINE_EXCEEDED", "prefill", "bootstrap_timeout")
    pair.decode.add(request(2, prompts([10])[0], bootstrap_deadline=10.0, waiting_deadline=20.0))
    pair.decode.step()
    pair.decode.reap(15.0)
    assert not pair.decode.has_work()
    pair.decode.reap(20.0)
    events = run(pair.decode)
    (late,) = [event for event in events if isinstance(event, Failed)]
    assert (late.failure.origin, late.failure.cause) == ("decode", "waiting_timeout")
    pair.run()
    pair.assert_clean()


def test_the_wrong_port_for_a_role_is_refused(tiny):
    from baton.engine import InvalidSettingError

    link = Pair(tiny.ours).link
    for role, ports in [
        (Role.PREFILL, {}),
        (Role.DECODE, {}),
        (Role.PLAIN, {"exporter": link.exporter}),
        (Role.PREFILL, {"exporter": link.exporter, "importer": link.importer}),
    ]:
        with pytest.raises(InvalidSettingError, match="porter"):
            engine(tiny.ours, role, **ports)
    assert isinstance(engine(tiny.ours), Engine)
