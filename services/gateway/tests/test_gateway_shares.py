"""The limits of a key: how many at once, how many a minute, how many tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.callers import ANONYMOUS, Caller
from baton.gateway.errors import KeyLimitError
from baton.gateway.shares import Share, Shares
from baton.servicekit import KeyLimits

# --- limits of a key ---------------------------------------------------------------------------------------------------------------


def caller(**limits: Any) -> Caller:
    return Caller("0123456789ab", KeyLimits(**limits))


def test_a_keys_concurrent_requests() -> None:
    shares, who = Shares(), caller(max_concurrent=2)
    held = [Share(shares, who) for _ in range(3)]
    held[0].begin(0)
    held[1].begin(0)
    text = "API key 0123456789ab has 2 answers open or waiting, this request would add 1, its limit is 2"
    with pytest.raises(KeyLimitError, match=text) as caught:
        held[2].begin(0)
    assert (caught.value.cause, caught.value.retry_after_s) == ("key_concurrency", 1)
    held[2].end()  # never begun: nothing to give back
    held[0].end()
    held[0].end()
    held[2].begin(0)
    for share in held:
        share.end()
    assert len(shares) == 0
    assert shares.counters == {"key_concurrency": 1}


def test_each_of_a_requests_answers_counts() -> None:
    shares, who = Shares(), caller(max_concurrent=4)
    several, one = Share(shares, who), Share(shares, who)
    several.begin(0, 3)
    with pytest.raises(KeyLimitError, match="has 3 answers open or waiting, this request would add 2, its limit is 4"):
        one.begin(0, 2)
    one.begin(0)
    several.end()
    more = Share(shares, who)
    more.begin(0, 3)
    one.end()
    more.end()
    assert len(shares) == 0


@given(st.integers(1, 5), st.lists(st.floats(0, 30), max_size=60))
def test_no_minute_has_more_requests_than_the_limit(limit: int, pauses: list[float]) -> None:
    shares, who, now = Shares(), caller(requests_per_minute=limit), 1000.0
    begun: list[float] = []
    for pause in pauses:
        now += pause
        share = Share(shares, who)
        recent = [at for at in begun if at > now - 60]
        if len(recent) < limit:
            share.begin(now)
            share.end()
            begun.append(now)
        else:
            with pytest.raises(KeyLimitError) as caught:
                share.begin(now)
            assert caught.value.cause == "key_rate"
            again = now + caught.value.retry_after_s
            assert len([at for at in begun if at > again - 60]) < limit, "after the time that it was told"
            assert caught.value.retry_after_s <= 61


def test_a_keys_tokens() -> None:
    shares, who = Shares(), caller(tokens_in_flight=100)
    one, other = Share(shares, who), Share(shares, who)
    one.begin(0)
    one.add_tokens(70)
    other.begin(0)
    with pytest.raises(KeyLimitError, match="has 70 tokens open or waiting, this request would add 31"):
        other.add_tokens(31)
    other.add_tokens(30)
    one.end()
    other.end()
    assert len(shares) == 0


def test_the_anonymous_have_no_account() -> None:
    shares = Shares()
    for _ in range(100):
        share = Share(shares, ANONYMOUS)
        share.begin(0)
        share.add_tokens(10**9)
    assert len(shares) == 0
