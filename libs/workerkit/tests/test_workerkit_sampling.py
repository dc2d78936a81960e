"""What of a Start's sampling reaches the engine, and what is refused; what the engine's log probabilities look like on the wire."""

from __future__ import annotations

import math
from typing import Any

import pytest

from baton.engine.types import Logprobs, PromptLogprobs, Role, Token
from baton.wire.v1 import worker_pb2
from baton.workerkit.errors import RefusedError
from baton.workerkit.intake import Limits, take
from baton.workerkit.session import GatewaySession

LIMITS = Limits(Role.PLAIN, vocab_size=50, max_model_len=100, num_pages=20, page_size=16)


def start(**sampling: Any) -> worker_pb2.Start:
    message = worker_pb2.Start(room=5, prompt_token_ids=[1, 2, 3], sampling=worker_pb2.Sampling(**({"top_p": 1, "max_tokens": 4} | sampling)))
    message.plain.SetInParent()
    return message


def test_every_field_reaches_the_engine() -> None:
    asked = take(
        start(
            repetition_penalty=0.01,
            presence_penalty=-2,
            frequency_penalty=2,
            bias_token_ids=[7, 3],
            bias_values=[100, -0.5],
            top_logprobs=20,
            prompt_logprobs=0,
            answered_tokens=2,
        ),
        LIMITS,
        0.0,
    ).sampling
    assert asked.repetition_penalty == pytest.approx(0.01)
    assert (asked.presence_penalty, asked.frequency_penalty) == (-2, 2)
    assert asked.logit_bias == ((7, 100.0), (3, -0.5))
    assert (asked.top_logprobs, asked.prompt_logprobs, asked.answered_tokens) == (20, 0, 2)


def test_the_salt_of_prefixes_reaches_the_engine() -> None:
    message = start()
    assert take(message, LIMITS, 0.0).cache_salt == ""
    message.cache_salt = "tenant"
    assert take(message, LIMITS, 0.0).cache_salt == "tenant"


def test_a_gateway_that_does_not_know_the_fields_turns_nothing_on() -> None:
    asked = take(start(), LIMITS, 0.0).sampling
    assert not asked.adjusts
    assert asked.top_logprobs is asked.prompt_logprobs is None


@pytest.mark.parametrize(
    ("sampling", "part"),
    [
        ({"repetition_penalty": -1}, "repetition_penalty=-1.0 is outside [0.01, 10.0]"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf is outside"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 is outside [-2.0, 2.0]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan is outside"),
        ({"bias_token_ids": [1]}, "bias_token_ids has 1 tokens and bias_values 0 numbers"),
        ({"bias_token_ids": [50], "bias_values": [1]}, "token 50, the model's vocabulary is [0, 50)"),
        ({"bias_token_ids": [1], "bias_values": [math.nan]}, "bias_values has nan, which is outside [-100.0, 100.0]"),
        ({"bias_token_ids": [1] * 301, "bias_values": [1] * 301}, "301 tokens, the limit is 300"),
        ({"top_logprobs": 21}, "top_logprobs=21 is above 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21 is above 20"),
        ({"answered_tokens": 3}, "answered_tokens=3 is not below the prompt's 3 tokens"),
    ],
)
def test_what_no_engine_may_be_given_is_refused(sampling: dict[str, Any], part: str) -> None:
    with pytest.raises(RefusedError) as refused:
        take(start(**sampling), LIMITS, 0.0)
    assert part in str(refused.value)


async def test_log_probabilities_are_in_the_report_of_their_token() -> None:
    session = GatewaySession("gateway", "")
    session.tokens([Token(5, 0, 9), Token(6, 2, 8, Logprobs(-0.5, ((8, -0.5), (3, -1.5))))])
    report = await session.next_report()
    assert report is not None
    assert (list(report.rooms), list(report.tokens)) == ([5, 6], [9, 8])
    (said,) = report.logprobs
    assert (said.room, said.index, said.logprobs.logprob) == (6, 2, -0.5)
    assert (list(said.logprobs.top_token_ids), list(said.logprobs.top_logprobs)) == ([8, 3], [-0.5, -1.5])


async def test_a_prompts_log_probabilities_are_told_by_part() -> None:
    session = GatewaySession("g", "")
    session.prompt_logprobs(PromptLogprobs(6, 1, (Logprobs(-0.5, ((8, -0.25),), 2), Logprobs(-1.5, (), 1))))
    report = await session.next_report()
    assert report is not None
    (said,) = report.prompt_logprobs
    assert (said.room, said.first) == (6, 1)
    assert [(one.logprob, one.rank, list(one.top_token_ids)) for one in said.logprobs] == [(-0.5, 2, [8]), (-1.5, 1, [])]
