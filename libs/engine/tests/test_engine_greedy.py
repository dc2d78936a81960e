"""Plain role: token for token what transformers generates, whatever else is in the batch, and every page back."""

from __future__ import annotations

import pytest
from engine_reference import CANCEL, answers, assert_all_free, ends, engine, prompts, request, run

from baton.engine import DuplicateRoomError, FinishReason, Role
from baton.engine.types import Failed, Finished, PrefillStarted, Token

LENGTHS = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 65, 100]


@pytest.mark.parametrize(("page_size", "budget"), [(4, 64), (16, 512), (16, 9), (1, 33)])
def test_greedy_is_transformers_at_once_and_one_by_one(tiny, page_size, budget):
    asked = dict(enumerate(prompts(LENGTHS), start=1))
    expected = {room: tiny.greedy(prompt, 24) for room, prompt in asked.items()}
    plain = engine(tiny.ours, num_pages=1600 // page_size, page_size=page_size, max_num_batched_tokens=budget, max_running=8)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=24))
    events = run(plain)
    assert answers(events) == expected
    assert all(end.reason is FinishReason.LENGTH and end.completion_tokens == 24 for end in ends(events).values())
    assert_all_free(plain)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=24))
        assert answers(run(plain)) == {room: expected[room]}
    assert_all_free(plain)


def test_retraction_continues_the_stream_with_the_same_tokens(tiny):
    asked = dict(enumerate(prompts([20, 21, 22, 23], seed=4), start=1))
    expected = {room: tiny.greedy(prompt, 40) for room, prompt in asked.items()}
    # 4 x 60 tokens want 60 pages; 36 are there, and admission expects only 4 tokens of answer.
    plain = engine(tiny.ours, num_pages=36, growth_tokens=4)
    for room, prompt in asked.items():
        plain.add(request(room, prompt, max_tokens=40))
    events = run(plain)
    assert answers(events) == expected
    stats = plain.stats()
    assert stats.extra["retractions"] >= 2
    assert stats.extra["recomputed_tokens"] > 0
    assert_all_free(plain)


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_retraction(tiny):
    asked = dict(enumerate(prompts([20, 21, 22, 23], seed=5), start=1))

    def sampled(**settings):
        plain = engine(tiny.ours, **settings)
        for room, prompt in asked.items():
            plain.add(request(room, prompt, max_tokens=40, temperature=1.0, top_p=0.9, seed=room))
        found = answers(run(plain))
        return found, plain.stats().extra["retractions"]

    roomy, none = sampled(num_pages=64)
    tight, some = sampled(num_pages=36, growth_tokens=4)
    chunked, _ = sampled(num_pages=64, max_num_batched_tokens=8, max_running=2)
    assert (none, some > 0) == (0, True)
    assert roomy == tight == chunked
    assert len({tuple(tokens) for tokens in roomy.values()}) == 4


def test_stop_tokens_end_an_answer_and_are_part_of_it(tiny):
    prompt = prompts([12])[0]
    expected = tiny.greedy(prompt, 30)
    stop = expected[7]
    first = expected.index(stop)
    plain = engine(tiny.ours)
    plain.add(request(1, prompt, max_tokens=30, stop_token_ids=frozenset({stop})))
    events = run(plain)
    assert answers(events)[1] == expected[: first + 1]
    assert ends(events)[1] == Finished(1, FinishReason.STOP, first + 1)
    assert_all_free(plain)


def test_the_context_ends_an_answer(tiny):
    prompt = prompts([200])[0]
    plain = engine(tiny.ours, num_pages=100)
    assert plain.max_model_len == 256
    plain.add(request(1, prompt, max_tokens=1000))
    end = ends(run(plain))[1]
    assert end == Finished(1, FinishReason.LENGTH, 56)
    assert_all_free(plain)


def test_the_pool_bounds_the_context(tiny):
    plain = engine(tiny.ours, num_pages=10)
    assert plain.max_model_len == 40
    plain.add(request(1, prompts([30])[0], max_tokens=1000))
    assert ends(run(plain))[1] == Finished(1, FinishReason.LENGTH, 10)
    assert_all_free(plain)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "cause", "words"),
    [
        ([], 4, "prompt_empty", ["0 tokens"]),
        ([5] * 300, 4, "prompt_too_long", ["300 tokens", "255"]),
        ([5] * 256, 4, "prompt_too_long", ["256 tokens", "255"]),
        ([1, 131], 4, "token_out_of_range", ["131", "0 to 130"]),
        ([1, -1], 4, "token_out_of_range", ["-1"]),
        ([1], 0, "max_tokens_too_small", ["max_tokens = 0"]),
    ],
)
def test_what_can_never_fit_is_refused_with_its_numbers(tiny, prompt, max_tokens, cause, words):
    plain = engine(tiny.ours)
    plain.add(request(1, prompt, max_tokens=max_tokens))
    assert plain.has_work()
    (event,) = run(plain)
    assert isinstance(event, Failed)
    assert (event.failure.code, event.failure.origin, event.failure.cause) == ("INVALID_ARGUMENT", "decode", cause)
    assert all(word in event.failure.message for word in words), event.failure.message
    assert_all_free(plain)


def test_a_room_is_single_use_while_it_is_open(tiny):
    plain = engine(tiny.ours)
    plain.add(request(1, [1, 2, 3]))
    with pytest.raises(DuplicateRoomError, match="room 1"):
        plain.add(request(1, [4]))
    run(plain)
    assert_all_free(plain)


@pytest.mark.parametrize("after_steps", [0, 1, 2, 5])
def test_an_abort_gives_the_pages_back_at_once(tiny, after_steps):
    plain = engine(tiny.ours, max_num_batched_tokens=32)
    asked = prompts([60, 10])
    expected = tiny.greedy(asked[1], 16)
    plain.add(request(1, asked[0], max_tokens=30))
    plain.add(request(2, asked[1], max_tokens=16))
    events = [event for _ in range(after_steps) for event in plain.step()]
    plain.abort(1, CANCEL)
    plain.abort(1, CANCEL)
    plain.abort(99, CANCEL)
    events += run(plain)
    assert ends(events)[1] == Failed(1, CANCEL)
    assert answers(events)[2] == expected
    assert_all_free(plain)


def test_clocks_end_rooms_without_new_requests(tiny):
    plain = engine(tiny.ours, num_pages=10, max_running=1)
    plain.add(request(1, prompts([20])[0], max_tokens=15, deadline=50.0))
    plain.add(request(2, prompts([20])[0], max_tokens=15, waiting_deadline=30.0))
    plain.add(request(3, prompts([20])[0], max_tokens=15, arrived=1.0))
    plain.step()
    plain.reap(29.9)
    assert plain.stats().rooms == 3
    plain.reap(30.0)
    plain.reap(50.0)
    events = run(plain)
    found = ends(events)
    assert (found[1].failure.code, found[1].failure.cause) == ("DEADLINE_EXCEEDED", "deadline")
    assert (found[2].failure.code, found[2].failure.cause) == ("DEADLINE_EXCEEDED", "waiting_timeout")
    assert isinstance(found[3], Finished)
    assert_all_free(plain)


def test_prompts_are_computed_beside_decode_rows(tiny):
    """A long prompt in chunks does not stop the streams: every step gives the running room a token."""
    plain = engine(tiny.ours, max_num_batched_tokens=16)
    plain.add(request(1, prompts([5])[0], max_tokens=30))
    plain.step()
    plain.add(request(2, prompts([100])[0], max_tokens=2))
    steps = [[event.room for event in plain.step() if isinstance(event, Token)] for _ in range(7)]
    assert steps == [[1]] * 6 + [[1, 2]]
    run(plain)
    assert_all_free(plain)


def test_events_of_a_room_come_in_order(tiny):
    plain = engine(tiny.ours)
    plain.add(request(1, prompts([5])[0], max_tokens=2))
    assert [type(event) for event in run(plain)] == [PrefillStarted, Token, Token, Finished]
    assert plain.stats().steps == 2
    assert plain.stats().extra["computed_tokens"] == 6
    assert plain.role is Role.PLAIN


def test_damaged_weights_fail_the_room_and_not_the_engine(tiny):
    plain = engine(tiny.ours)
    plain._runner._pool.planes.fill_(float("nan"))
    plain.add(request(1, prompts([5])[0], max_tokens=4))
    plain.step()
    plain._runner._pool.planes.fill_(float("nan"))
    events = run(plain)
    assert ends(events)[1].failure.cause == "logits_not_finite"
    assert_all_free(plain)
    prompt = prompts([5])[0]
    plain.add(request(2, prompt, max_tokens=4))
    assert answers(run(plain))[2] == tiny.greedy(prompt, 4)


def test_min_tokens_holds_the_stop_back(tiny):
    prompt = prompts([12])[0]
    stop = tiny.greedy(prompt, 1)[0]
    plain = engine(tiny.ours)
    plain.add(request(1, prompt, max_tokens=9, min_tokens=3, stop_token_ids=frozenset({stop})))
    tokens = answers(run(plain))[1]
    assert len(tokens) >= 3
    assert stop not in tokens[:3]
