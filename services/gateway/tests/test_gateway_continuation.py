"""What is left of a request behind the tokens that it has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.admission import Admitted
from baton.gateway.continuation import continued, ended_by
from baton.wire.v1 import common_pb2, worker_pb2

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def sampling(max_tokens: int, min_tokens: int = 0, stop: tuple[int, ...] = (), answered: int = 0) -> worker_pb2.Sampling:
    return worker_pb2.Sampling(
        temperature=1,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        seed=7,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop,
        presence_penalty=0.5,
        answered_tokens=answered,
    )


def test_the_rest_is_the_same_request_further_on() -> None:
    admitted = Admitted([1, 2], sampling(10, 4, (9,)), ("end",))
    rest = continued(admitted, [5, 6, 7])
    assert (rest.prompt, rest.stop) == ([1, 2, 5, 6, 7], ("end",))
    assert rest.sampling == sampling(7, 1, (9,), answered=3)
    assert continued(rest, [8]).sampling == sampling(6, 0, (9,), answered=4)
    assert admitted.sampling == sampling(10, 4, (9,))  # the request itself stays what it was
    assert continued(admitted, [5] * 9).sampling == sampling(1, 0, (9,), answered=9)
    assert continued(admitted, []) is admitted


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 12), st.data())
def test_the_rest_ends_where_the_whole_would(tokens: list[int], max_tokens: int, min_tokens: int, data: st.DataObject) -> None:
    """Wherever the answer is cut, what is left of it ends at the same token and for the same reason."""
    whole = sampling(max_tokens, min(min_tokens, max_tokens), (0, 1))
    length = next((count for count in range(1, len(tokens) + 1) if ended_by(whole, tokens[:count]) is not None), None)
    had = data.draw(st.integers(0, (length or min(len(tokens), max_tokens)) - 1))
    rest = continued(Admitted([3], whole, ()), tokens[:had]).sampling
    for count in range(had + 1, (length or len(tokens)) + 1):
        assert ended_by(rest, tokens[had:count]) == ended_by(whole, tokens[:count])


def test_an_answer_is_complete_at_its_last_token() -> None:
    assert ended_by(sampling(3, 2, (9,)), [9]) is None  # min_tokens
    assert ended_by(sampling(3, 2, (9,)), [9, 9]) == STOP
    assert ended_by(sampling(3, 2, (9,)), [1, 2]) is None
    assert ended_by(sampling(3, 2, (9,)), [1, 2, 3]) == LENGTH
    assert ended_by(sampling(3, 2, (9,)), [1, 2, 9]) == STOP
    assert ended_by(sampling(3), []) is None
