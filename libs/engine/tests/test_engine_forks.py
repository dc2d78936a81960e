"""Several answers to one prompt: computed once, moved once, its whole pages shared, its last one copied."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_pair import Pair, legs
from engine_reference import CANCEL, answers, assert_all_free, ends, engine, make_reference, prompts, request, run
from test_engine_device import on_device, plain_twins  # noqa: F401
from test_engine_schedulers import complete, limits

from baton.engine import load_model
from baton.engine.allocator import PageAllocator
from baton.engine.page_book import PageBook
from baton.engine.prefix_tree import PrefixTree
from baton.engine.scheduling.plain import PlainScheduler
from baton.engine.types import Failed, Finished, PrefillStarted, Transferred

SAMPLED = {"temperature": 1.0, "top_p": 0.95}


def family(prompt, num=4, first=1, max_tokens=12, **fields):
    """A room and its forks; each with a seed of its own."""
    source = request(first, prompt, max_tokens=max_tokens, seed=first, num_forks=num - 1, **SAMPLED, **fields)
    forks = [
        replace(source, room=room, num_forks=0, fork_of=first, prompt=list(prompt), sampling=replace(source.sampling, seed=room))
        for room in range(first + 1, first + num)
    ]
    return [source, *forks]


def alone(model, asked):
    """What each of them is answered as a request of its own."""
    plain = engine(model)
    for each in asked:
        plain.add(replace(each, fork_of=0, num_forks=0))
    return answers(run(plain))


def computed(each) -> int:
    return each.stats().extra["computed_tokens"]


def add(pair, asked) -> None:
    pair.add(asked[0])
    for each in asked[1:]:
        pair.decode.add(each)


@pytest.mark.parametrize("length", [1, 3, 4, 21, 24])
@pytest.mark.parametrize("caches", [False, True])
def test_four_answers_take_one_prefill_one_transfer_and_their_own_pages(tiny, length, caches):
    """Prompts that end within a page and with one."""
    pair = Pair(tiny.ours, prefix_cache=caches)
    asked = family(prompts([length])[0])
    expected = alone(tiny.ours, asked)
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    add(pair, asked)
    events = pair.run()
    assert legs(events) == expected
    assert computed(pair.prefill) == length
    assert [event.room for event in events if isinstance(event, Transferred)] == [1]
    assert {room for room, *_ in pair.link.layers_handed_over} == {1}
    # The last token of the prompt once for each fork, and each token of four answers but the last, of which the source's first came from prefill.
    assert computed(pair.decode) == 3 + 4 * 11
    assert pair.decode.stats().extra["recomputed_tokens"] == 0
    pair.assert_clean()


@pytest.mark.parametrize("caches", [False, True])
def test_whole_pages_of_the_prompt_are_held_once(tiny, caches):
    """21 tokens are five whole pages and one of one token: four answers of one token each hold 5 + 4 pages."""
    plain = engine(tiny.ours, prefix_cache=caches)
    for first in (1, 11):  # what the first four leave behind takes nothing from the next four
        asked = family(prompts([21])[0], first=first, max_tokens=3)
        before = computed(plain)
        for each in asked:
            plain.add(each)
        fewest = plain.stats().free_pages
        events = []
        while plain.has_work():
            events += plain.step()
            fewest = min(fewest, plain.stats().free_pages)
        assert plain.stats().total_pages - fewest == 5 + 4
        assert answers(events) == alone(tiny.ours, asked)
        assert computed(plain) - before == (1 if caches and before else 21) + 3 + 4 * 2
        assert_all_free(plain)


def test_pages_that_are_shared_are_counted_once_when_forks_are_let_in(tiny):
    """A prompt of half the pool: its forks come in beside it, because what they share with it comes out of nobody's free pages."""
    plain = engine(tiny.ours, num_pages=20, growth_tokens=4)
    for each in family(prompts([40])[0], max_tokens=6):
        plain.add(each)
    events = run(plain)
    first_end = next(place for place, event in enumerate(events) if isinstance(event, Finished))
    assert len(answers(events[:first_end])) == 4
    assert plain.stats().extra["retractions"] == 0
    assert_all_free(plain)


def test_what_a_family_shared_is_nobody_elses_without_a_cache(tiny):
    plain = engine(tiny.ours)
    prompt = prompts([40])[0]
    for first in (1, 11):
        for each in family(prompt, num=2, first=first, max_tokens=1):
            plain.add(each)
        run(plain)
        assert_all_free(plain)
    assert plain.stats().extra["computed_tokens"] >= 2 * 40
    before = computed(plain)
    plain.add(request(21, prompt, max_tokens=1))
    run(plain)
    assert computed(plain) - before == 40


def test_a_source_that_ends_first_leaves_its_pages_to_its_forks(tiny):
    """It ends with its first token, before any fork has a page: they compute the last page, and no other."""
    pair = Pair(tiny.ours)
    prompt = prompts([22])[0]
    asked = family(prompt)
    asked[0] = replace(asked[0], sampling=replace(asked[0].sampling, max_tokens=1))
    expected = alone(tiny.ours, asked)
    add(pair, asked)
    assert legs(pair.run()) == expected
    assert computed(pair.decode) == 3 * (2 + 11)
    pair.assert_clean()


def test_retraction_of_one_does_not_disturb_the_others(tiny):
    """Five pages of prompt are shared, each answer grows to eight more: the pool of 24 holds two of them and a part of the others."""
    plain = engine(tiny.ours, num_pages=24, growth_tokens=4)
    asked = family(prompts([20])[0], max_tokens=32)
    for each in asked:
        plain.add(each)
    assert answers(run(plain)) == alone(tiny.ours, asked)
    assert plain.stats().extra["retractions"] >= 1
    assert_all_free(plain)


def test_more_answers_than_may_run_at_once_take_their_turns(tiny):
    plain = engine(tiny.ours, max_running=2)
    asked = family(prompts([13])[0], num=6)
    for each in asked:
        plain.add(each)
    assert answers(run(plain)) == alone(tiny.ours, asked)
    assert_all_free(plain)


@pytest.mark.parametrize("room", [1, 3])
def test_one_that_is_ended_leaves_the_others_as_they_were(tiny, room):
    plain = engine(tiny.ours)
    asked = family(prompts([13])[0])
    expected = alone(tiny.ours, asked)
    for each in asked:
        plain.add(each)
    events = []
    while len(answers(events)) < 4:
        events += plain.step()
    plain.abort(room, CANCEL)
    events += run(plain)
    said = answers(events)
    assert said.pop(room) == expected[room][: len(answers(events)[room])]
    assert said == {other: tokens for other, tokens in expected.items() if other != room}
    assert isinstance(ends(events)[room], Failed)
    assert_all_free(plain)


def test_a_source_that_fails_before_its_prompt_landed_takes_its_forks_with_it(tiny):
    pair = Pair(tiny.ours)
    pair.link.hold()
    add(pair, family(prompts([13])[0]))
    pair.run()
    for each in (pair.prefill, pair.decode):
        each.abort(1, CANCEL)
    pair.link.release()
    events = pair.run()
    assert {room for room, end in ends(event for event in events if event.room > 1).items() if end == Failed(room, CANCEL)} == {2, 3, 4}
    assert not answers(events)
    pair.assert_clean()


def test_a_fork_that_is_ended_while_it_waits_is_not_begun(tiny):
    pair = Pair(tiny.ours)
    asked = family(prompts([13])[0])
    add(pair, asked)
    pair.decode.abort(2, CANCEL)
    events = pair.run()
    assert sorted(legs(events)) == [1, 3, 4]
    assert PrefillStarted(2) not in events
    pair.assert_clean()


def test_a_fork_of_nobody_is_refused_and_one_that_comes_late_is_taken(tiny):
    plain = engine(tiny.ours)
    source, *forks = family(prompts([9])[0], num=3)
    plain.add(source)
    events = []
    while not answers(events):
        events += plain.step()
    plain.add(forks[0])
    events += run(plain)
    plain.add(forks[1])
    events += run(plain)
    assert answers(events)[2] == alone(tiny.ours, [forks[0]])[2]
    found = ends(events)
    assert isinstance(found[1], Finished)
    assert found[3].failure.cause == "fork_source_gone"
    assert "room 1" in found[3].failure.message
    assert_all_free(plain)


@pytest.mark.parametrize("length", [21, 24])
def test_on_a_device_where_steps_are_launched_unread(tiny, length):
    """Penalties and log probabilities too: they are of the prompt and of each answer by itself."""
    asked = family(prompts([length])[0], repetition_penalty=1.2, presence_penalty=0.5, top_logprobs=2)
    model = on_device(tiny.folder)
    plain = engine(model)
    for each in asked:
        plain.add(each)
    assert answers(run(plain)) == alone(model, asked) == alone(tiny.ours, asked)
    assert_all_free(plain)


def test_over_two_ranks_each_copies_its_own_share(tmp_path):
    reference = make_reference(tmp_path, "llama", vocab_size=132, num_key_value_heads=2)
    sharded = load_model(tmp_path, tensor_parallel=2)
    try:
        plain = engine(sharded)
        asked = family(prompts([21])[0])
        for each in asked:
            plain.add(each)
        assert answers(run(plain)) == alone(reference.ours, asked)
        assert_all_free(plain)
    finally:
        sharded.close()


def test_a_page_is_kept_until_the_step_that_copies_it_has_run():
    """Its owner sits that step out, as a row that a grammar holds does, and ends: whoever gets the page next may be a peer that writes at once."""
    allocator = PageAllocator(20)
    scheduler = PlainScheduler(PageBook(allocator, PrefixTree(2), caches=False), limits(20))
    source, fork = family([1] * 5, num=2, max_tokens=6)
    scheduler.add(source)
    complete(scheduler, scheduler.plan(), [5])
    scheduler._rooms[1].runs_ahead = False
    before = scheduler.plan()
    scheduler.advance(before)
    scheduler.add(fork)
    copying = scheduler.plan()
    scheduler.advance(copying)
    assert [piece.sequence.room for piece in copying.slices] == [2]
    ((page, _),) = copying.copies
    scheduler.abort(1, CANCEL)
    scheduler.resolve(before, [5])
    assert page not in free_pages(allocator)
    scheduler.resolve(copying, [5])
    assert page in free_pages(allocator)


def free_pages(allocator) -> set[int]:
    return {page for first, count in allocator.free_runs() for page in range(first, first + count)}
