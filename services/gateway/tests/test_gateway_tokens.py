"""Merging two servers' tokens, and the buffer in front of a client."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.errors import RoomFailedError
from baton.gateway.tokens import TokenConflictError, TokenMerge, TokenStream
from baton.wire.v1 import common_pb2


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.randoms(use_true_random=False), st.integers(0, 20))
def test_any_order_with_repeats_gives_the_answer_once(answer: list[int], random: object, num_repeats: int) -> None:
    deliveries = [*enumerate(answer), *(random.choice(list(enumerate(answer))) for _ in range(num_repeats))]  # type: ignore[attr-defined]
    random.shuffle(deliveries)  # type: ignore[attr-defined]
    merge = TokenMerge(len(answer))
    out: list[int] = []
    for index, token in deliveries:
        out += merge.add(index, token)
        assert out == answer[: len(out)]
        assert merge.num_delivered == len(out)
    assert out == answer
    assert merge.num_repeated == num_repeats
    assert merge.num_early == 0


def test_a_conflict_is_found_also_behind_and_ahead() -> None:
    merge = TokenMerge(10)
    merge.add(0, 5)
    merge.add(3, 8)
    for index, token in ((0, 6), (3, 9)):
        with pytest.raises(TokenConflictError, match=f"number {index}"):
            merge.add(index, token)
    with pytest.raises(TokenConflictError, match="at most 10"):
        merge.add(10, 1)


def test_token_number_zero_may_be_token_zero() -> None:
    assert TokenMerge(2).add(0, 0) == [0]


async def test_a_stream_gives_batches_then_its_end() -> None:
    stream = TokenStream(100)
    stream.push([1, 2])
    stream.push([3])
    assert await stream.take() == [1, 2, 3]
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.push([4])
    stream.end(common_pb2.FINISH_REASON_STOP)
    assert await waiting == [4]
    assert await stream.take() == []
    assert await stream.take() == []


async def test_a_failure_comes_after_the_tokens_before_it() -> None:
    stream = TokenStream(100)
    stream.push([1])
    stream.fail(common_pb2.Failure(cause="decode_lost"))
    assert await stream.take() == [1]
    with pytest.raises(RoomFailedError) as caught:
        await stream.take()
    assert caught.value.cause == "decode_lost"


async def test_the_bound_is_told() -> None:
    stream = TokenStream(2)
    assert stream.push([1, 2])
    assert not stream.push([3])
