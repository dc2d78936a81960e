"""Prefix caches: the same tokens with and without, less computed and less moved; what is damaged or another's is never found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_pair import Pair, legs
from engine_reference import CANCEL, answers, assert_all_free, ends, engine, prompts, request, run

from baton.engine.types import Bootstrapped, Failed, Finished, PrefillStarted, Reserved, Token, Transferred, TransferStarted


def found(each) -> int:
    return each.stats().extra["prefix_found_tokens"]


def computed(each) -> int:
    return each.stats().extra["computed_tokens"]


SHAPES = [(4, 64), (16, 512), (4, 9), (1, 33)]


@pytest.mark.parametrize(("page_size", "budget"), SHAPES)
def test_plain_says_the_same_with_a_cache_and_computes_what_is_new(tiny, page_size, budget):
    """Prompts that share 40 tokens, at once and one after the other, and each again as it was."""
    shared, *tails = prompts([40, 1, 7, 16, 33])
    asked = dict(enumerate([shared + tail for tail in tails], start=1))
    expected = {room: tiny.greedy(prompt, 12) for room, prompt in asked.items()}
    plain = engine(tiny.ours, num_pages=1600 // page_size, page_size=page_size, max_num_batched_tokens=budget, max_running=8, prefix_cache=True)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=12))
    assert answers(run(plain)) == expected
    for room, prompt in asked.items():
        before = computed(plain)
        plain.add(request(room, prompt, max_tokens=12))
        assert answers(run(plain)) == {room: expected[room]}
        resident = (len(prompt) - 1) // page_size * page_size
        assert computed(plain) - before == len(prompt) - resident + 11
    assert_all_free(plain)


def test_without_the_setting_nothing_is_kept(tiny):
    plain = engine(tiny.ours)
    for room in (1, 2):
        plain.add(request(room, prompts([40])[0], max_tokens=2))
        run(plain)
    assert computed(plain) == 2 * 41
    assert "prefix_found_tokens" not in plain.stats().extra


def test_an_answer_is_found_by_the_next_turn(tiny):
    plain = engine(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([21])
    plain.add(request(1, prompt, max_tokens=10))
    (answer,) = answers(run(plain)).values()
    turn = [*prompt, *answer, 7, 8, 9]
    before = computed(plain)
    plain.add(request(2, turn, max_tokens=4))
    assert answers(run(plain))[2] == tiny.greedy(turn, 4)
    assert found(plain) == 28  # of 30 computed tokens: the last one that was drawn was not
    assert computed(plain) - before == len(turn) - 28 + 3


def test_a_seed_draws_the_same_with_a_cache(tiny):
    (prompt,) = prompts([33])
    drawn = []
    for caches in (False, True):
        plain = engine(tiny.ours, prefix_cache=caches)
        for room in (1, 2):
            plain.add(request(room, prompt, max_tokens=20, temperature=1.0, top_p=0.9, seed=5))
            drawn += answers(run(plain)).values()
    assert drawn == [drawn[0]] * 4


def test_another_salt_finds_nothing_and_the_same_one_does(tiny):
    plain = engine(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([33])
    for room, salt in enumerate(["", "a", "b"], start=1):
        plain.add(request(room, prompt, max_tokens=2, cache_salt=salt))
        run(plain)
    assert found(plain) == 0
    plain.add(request(4, prompt, max_tokens=2, cache_salt="a"))
    run(plain)
    assert found(plain) == 32
    assert_all_free(plain)


def test_pressure_evicts_before_anything_is_refused_or_retracted(tiny):
    """Twelve prompts through a pool that holds two: each leaves pages behind, and none waits for them."""
    plain = engine(tiny.ours, num_pages=24, growth_tokens=8, prefix_cache=True)
    asked = dict(enumerate(prompts([40] * 12, seed=8), start=1))
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=6))
        assert answers(run(plain)) == {room: tiny.greedy(prompt, 6)}
    stats = plain.stats()
    assert stats.extra["retractions"] == 0
    assert stats.extra["prefix_evicted_pages"] > 0
    plain.add(request(99, prompts([90])[0], max_tokens=5))  # nearly the whole pool
    assert answers(run(plain))[99] == tiny.greedy(prompts([90])[0], 5)
    assert_all_free(plain)


def test_retraction_with_a_cache_continues_with_the_same_tokens(tiny):
    asked = dict(enumerate(prompts([20, 21, 22, 23], seed=4), start=1))
    expected = {room: tiny.greedy(prompt, 40) for room, prompt in asked.items()}
    plain = engine(tiny.ours, num_pages=36, growth_tokens=4, prefix_cache=True)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=40))
    assert answers(run(plain)) == expected
    assert plain.stats().extra["retractions"] >= 2
    assert_all_free(plain)


def test_damaged_pages_are_not_found_again(tiny):
    """Not those that a failed room computed, and not those that it found: whoever comes next computes them anew."""
    plain = engine(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([33])
    plain.add(request(1, prompt, max_tokens=2))
    run(plain)
    plain._runner._pool.planes.fill_(float("nan"))
    plain.add(request(2, prompt, max_tokens=2))
    assert ends(run(plain))[2].failure.cause == "logits_not_finite"
    plain.add(request(3, prompt, max_tokens=8))
    assert answers(run(plain))[3] == tiny.greedy(prompt, 8)
    assert_all_free(plain)


def test_an_abort_in_a_chunk_leaves_nothing_half_computed(tiny):
    plain = engine(tiny.ours, max_num_batched_tokens=16, prefix_cache=True)
    (prompt,) = prompts([60])
    plain.add(request(1, prompt, max_tokens=4))
    plain.step()
    plain.step()
    plain.abort(1, CANCEL)
    plain.add(request(2, prompt, max_tokens=8))
    assert answers(run(plain))[2] == tiny.greedy(prompt, 8)
    assert found(plain) == 0
    assert_all_free(plain)


@pytest.mark.parametrize(("page_size", "budget"), SHAPES[:3])
def test_split_says_the_same_with_caches(tiny, page_size, budget):
    shared, *tails = prompts([40, 1, 7, 16, 33])
    asked = dict(enumerate([shared + tail for tail in tails], start=1))
    expected = {room: tiny.greedy(prompt, 12) for room, prompt in asked.items()}
    pair = Pair(tiny.ours, 512 // page_size, 512 // page_size, page_size=page_size, max_num_batched_tokens=budget, prefix_cache=True)
    for again in (0, 10):
        pair.add(*(request(again + room, prompt, max_tokens=12) for room, prompt in asked.items()))
        assert legs(pair.run()) == {again + room: tokens for room, tokens in expected.items()}
    assert found(pair.prefill) > 0
    assert found(pair.decode) > 0
    pair.assert_clean()


def turns(tiny, pair, num_turns: int, num_system: int = 40, num_tokens: int = 9):
    """(new tokens of the prompt, tokens computed on prefill, bytes moved, resident tokens at decode) of each turn of a conversation."""
    system, *users = prompts([num_system, *range(5, 5 + num_turns)])
    history = system
    for turn, user in enumerate(users, start=1):
        before = len(history)
        history = history + user
        had = computed(pair.prefill)
        pair.add(request(turn, history, max_tokens=num_tokens))
        events = pair.run()
        answer = legs(events)[turn]
        assert answer == tiny.greedy(history, num_tokens)
        (moved,) = [event.stats.num_bytes for event in events if isinstance(event, Transferred)]
        (resident,) = [event.resident_tokens for event in events if isinstance(event, Reserved)]
        yield len(history), before, computed(pair.prefill) - had, moved // pair.decode.layout.token_bytes, resident
        history = history + answer


def test_a_conversation_computes_and_moves_only_what_is_new(tiny):
    pair = Pair(tiny.ours, prefix_cache=True)
    prompt_before = 0
    for turn, (length, before, num_computed, num_moved, resident) in enumerate(turns(tiny, pair, 5), start=1):
        if turn == 1:
            assert (num_computed, resident) == (length, 0)
        else:
            # Decode has the last prompt and its answer, but for the token that was drawn last; prefill has the last prompt.
            assert resident == (before - 1) // 4 * 4
            assert num_computed == length - prompt_before // 4 * 4
        assert num_moved == -(-(length - resident) // 4) * 4
        prompt_before = length
    pair.assert_clean()


def test_pages_that_prefill_holds_go_out_before_its_forward_pass(tiny):
    pair = Pair(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([40])
    pair.prefill.add(request(1, prompt, max_tokens=1))
    run(pair.prefill)
    pair.decode.add(request(1, prompt, max_tokens=1))
    pair.run()
    pair.decode._scheduler._book.clear()
    pair.link.layers_handed_over.clear()
    order = []
    launch = pair.prefill._runner.launch

    def watched(*arguments):
        order.extend(pair.link.layers_handed_over)
        return launch(*arguments)

    pair.prefill._runner.launch = watched
    told = []
    pair.prefill.on_milestones(told.extend)
    pair.add(request(2, prompt, max_tokens=2))
    events = pair.decode.step() + pair.run()  # published before prefill looks
    assert [(layer, first, count) for _, layer, first, count in order] == [(layer, 0, 9) for layer in range(3)]
    assert [(layer, first, count) for _, layer, first, count in pair.link.layers_handed_over[3:]] == [(layer, 9, 1) for layer in range(3)]
    assert [type(event) for event in told] == [Bootstrapped, PrefillStarted, TransferStarted]
    assert legs(events)[2] == tiny.greedy(prompt, 2)
    pair.assert_clean()


def test_a_prompt_that_decode_holds_wholly_moves_nothing(tiny):
    pair = Pair(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([32])
    for room in (1, 2):
        pair.add(request(room, prompt, max_tokens=3))
        events = pair.run()
        assert legs(events)[room] == tiny.greedy(prompt, 3)
    assert [event.stats.num_bytes for event in events if isinstance(event, Transferred)] == [0]
    assert Reserved(2, 8, 32) in events
    pair.assert_clean()


def test_decode_finds_what_has_landed_while_it_is_still_in_use(tiny):
    pair = Pair(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([32])
    pair.add(request(1, prompt, max_tokens=30))
    events = []
    while not any(isinstance(event, Token) and event.index == 1 for event in events):
        events += pair.prefill.step() + pair.decode.step()
    pair.add(request(2, [*prompt, 5], max_tokens=3))
    events += pair.run()
    assert legs(events) == {1: tiny.greedy(prompt, 30), 2: tiny.greedy([*prompt, 5], 3)}
    assert Reserved(2, 9, 32) in events
    pair.assert_clean()


def test_what_has_not_landed_is_never_found(tiny):
    """A room that is aborted in mid-transfer: some of its pages were written, and nobody may take them for whole."""
    pair = Pair(tiny.ours, max_num_batched_tokens=16, prefix_cache=True)
    (prompt,) = prompts([60])
    pair.add(request(1, prompt, max_tokens=4))
    pair.decode.step()
    pair.prefill.step()
    pair.decode.abort(1, CANCEL)
    pair.run()
    pair.prefill.abort(1, CANCEL)
    pair.add(request(2, prompt, max_tokens=8))
    events = pair.run()
    assert legs(events)[2] == tiny.greedy(prompt, 8)
    assert [event.resident_tokens for event in events if isinstance(event, Reserved) and event.room == 2] == [0]
    pair.assert_clean()


def test_a_resident_prefix_outlives_the_abort_of_who_holds_it(tiny):
    pair = Pair(tiny.ours, max_num_batched_tokens=16, prefix_cache=True)
    first, tail = prompts([40, 30])
    pair.add(request(1, first, max_tokens=4))
    pair.run()
    pair.add(request(2, first + tail, max_tokens=4))
    pair.decode.step()
    pair.prefill.step()
    pair.link.hold()
    pair.decode.abort(2, CANCEL)
    pair.decode.step()
    stats = pair.decode.stats()
    assert stats.published_pages == 8  # its own; the ten that it shares are nobody's to write into
    assert stats.free_pages + stats.published_pages + stats.running_pages == stats.total_pages
    pair.link.release()
    pair.run()
    pair.add(request(3, first + tail, max_tokens=4))
    events = pair.run()
    assert legs(events)[3] == tiny.greedy(first + tail, 4)
    assert [event.resident_tokens for event in events if isinstance(event, Reserved)] == [40]
    pair.assert_clean()


def test_eviction_under_pressure_on_both_sides_never_corrupts(tiny):
    """Conversations of three, taking turns, through pools that hold little more than one of them."""
    pair = Pair(tiny.ours, 30, 40, growth_tokens=8, prefix_cache=True)
    histories = dict(enumerate(prompts([24, 30, 36], seed=3)))
    room = 0
    for turn in range(4):
        for who, history in histories.items():
            room += 1
            pair.add(request(room, history, max_tokens=6))
            events = pair.run()
            assert legs(events)[room] == tiny.greedy(history, 6), f"turn {turn} of {who}"
            histories[who] = [*history, *legs(events)[room], who + 1]
    assert pair.decode.stats().extra["prefix_evicted_pages"] > 0
    assert pair.prefill.stats().extra["prefix_evicted_pages"] > 0
    assert found(pair.decode) > 0
    pair.assert_clean()


def test_a_local_prompt_uses_what_has_landed(tiny):
    pair = Pair(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([41])
    pair.add(request(1, prompt, max_tokens=2))
    pair.run()
    before = computed(pair.decode)
    pair.decode.add(replace(request(2, prompt, max_tokens=3), local=True))
    events = run(pair.decode)
    assert answers(events)[2] == tiny.greedy(prompt, 3)
    assert computed(pair.decode) - before == 1 + 2
    assert [type(event) for event in events if not isinstance(event, Token)] == [Reserved, PrefillStarted, Finished]
    pair.assert_clean()


def test_a_prefill_that_fails_keeps_nothing(tiny):
    pair = Pair(tiny.ours, prefix_cache=True)
    (prompt,) = prompts([40])
    pair.add(request(1, prompt, max_tokens=2))
    pair.run()
    pair.prefill._runner._pool.planes.fill_(float("nan"))
    pair.decode._scheduler._book.clear()
    pair.add(request(2, prompt, max_tokens=2))
    events = pair.run()
    assert any(isinstance(event, Failed) and event.failure.cause == "logits_not_finite" for event in events)
    pair.add(request(3, prompt, max_tokens=8))
    assert legs(pair.run())[3] == tiny.greedy(prompt, 8)
    pair.assert_clean()
