"""Measures over raw samples that are written by hand."""

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace

from baton.bench.lag import judge_lag
from baton.bench.measures import Objectives, duration_s, errors_by_cause, gaps_s, goodput, split_by_prefill, tpot_s, ttft_s
from baton.bench.percentiles import Percentiles, Spread
from baton.bench.sample import Sample
from baton.bench.tokens import check_tokens, gives_back, load_counter

PLAIN = Sample(
    repeat=0, index=0, kind="chat", is_long=False, is_warm_up=False, prompt_words=5, max_tokens=9, scheduled_s=0.0, sent_s=0.0, ended_s=1.0
)


def sample(*token_s: float, sent_s: float = 0.0, **fields: object) -> Sample:
    base = dataclasses.replace(
        PLAIN, sent_s=sent_s, token_s=token_s, token_counts=(1,) * len(token_s), ended_s=token_s[-1] if token_s else sent_s + 1
    )
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = Percentiles.of(values, 1000)
    assert found is not None
    for name, q in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100)):
        assert getattr(found, name) == pytest.approx(float(np.percentile(np.array(values) * 1000, q)))
    assert (found.num, found.mean) == (len(values), pytest.approx(1000 * sum(values) / len(values)))


def test_nothing_has_no_percentiles() -> None:
    assert Percentiles.of([]) is None
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(3, 1.0, 2.0, 3.0)


def test_times_of_one_request() -> None:
    found = sample(1.5, 1.6, 2.0, sent_s=1.0)
    assert ttft_s(found) == pytest.approx(0.5)
    assert gaps_s(found) == pytest.approx([0.1, 0.4])
    assert tpot_s(found) == pytest.approx(0.25)
    assert ttft_s(sample()) is None
    assert tpot_s(sample(1.0)) is None


def test_tpot_counts_tokens_that_came_in_one_message() -> None:
    bunched = dataclasses.replace(sample(1.0, 2.0), token_counts=(1, 4), output_tokens=5)
    assert tpot_s(bunched) == pytest.approx(0.25)
    assert gaps_s(bunched) == [1.0]


def test_a_gap_is_held_against_the_long_prompt_of_another_only() -> None:
    long = sample(3.0, 3.1, 3.2, sent_s=1.0, is_long=True)
    other = sample(0.5, 0.9, 1.2, 2.9, 3.05, 3.5)
    split = split_by_prefill([long, other])
    assert sorted(split.during_s) == pytest.approx(sorted([0.3, 1.7, 0.15]))
    assert sorted(split.without_s) == pytest.approx(sorted([0.4, 0.45, 0.1, 0.1]))


def test_a_long_prompt_that_failed_counts_until_its_end() -> None:
    failed = sample(sent_s=1.0, is_long=True, ended_s=2.0, error="timeout")
    assert split_by_prefill([failed, sample(1.4, 1.5, 2.5, 2.6)]).without_s == pytest.approx([0.1])


spans = st.tuples(st.floats(0, 10), st.floats(0.01, 3)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(spans, max_size=6), st.lists(st.floats(0, 12), min_size=2, max_size=12, unique=True).map(sorted))
def test_the_split_is_the_naive_one(prefills: list[tuple[float, float]], tokens: list[float]) -> None:
    longs = [sample(end, sent_s=start, is_long=True) for start, end in prefills]
    pairs = list(pairwise(tokens))
    naive = [later - earlier for earlier, later in pairs if any(start < later and end > earlier for start, end in prefills)]
    split = split_by_prefill([*longs, sample(*tokens)])
    assert split.during_s == naive
    assert len(split.during_s) + len(split.without_s) == len(pairs)


def test_goodput_needs_both_objectives_and_counts_failures() -> None:
    objectives = Objectives(ttft_ms=500, itl_p99_ms=100)
    good, late, stalled = sample(0.4, 0.45), sample(0.6, 0.65), sample(0.4, 0.45, 0.8)
    failed, single = sample(0.1, 0.15, error="unavailable"), sample(0.3)
    found = goodput([good, late, stalled, failed, single], objectives, duration_s=2.0)
    assert (found.num_good, found.share, found.good_rps) == (2, 0.4, 1.0)


def test_duration_leaves_out_what_lies_between_repeats() -> None:
    assert duration_s([sample(2.0, sent_s=1.0), sample(5.0, sent_s=3.0), sample(1.0, sent_s=0.5, repeat=1)]) == pytest.approx(4.5)


def test_errors_are_counted_by_cause() -> None:
    assert errors_by_cause([sample(error="timeout"), sample(1.0), sample(error="http_503"), sample(error="timeout")]) == {"timeout": 2, "http_503": 1}


def percentiles(value: float) -> Percentiles:
    found = Percentiles.of([value])
    assert found is not None
    return found


def test_lag_matters_only_beside_what_is_measured() -> None:
    slow, fast = percentiles(400.0), percentiles(10.0)
    late = judge_lag([0.01] * 10, [0.0], fast, slow)
    assert late.matters
    assert "sent late (p99 10.0 ms, allowed 2.0 ms)" in late.verdicts[0]
    assert not judge_lag([0.01] * 10, [0.0], slow, slow).matters
    busy = judge_lag([0.0], [0.005] * 10, slow, fast)
    assert [verdict.split(" (")[0] for verdict in busy.verdicts] == ["arrivals were stamped late"]
    assert not judge_lag([0.0], [0.005] * 10, slow, slow).matters
    assert not judge_lag([0.001], [0.001], None, None).matters


def test_a_tokenizer_that_does_not_give_tokens_back_is_known(tmp_path: Path) -> None:
    """A word's pieces that are put together with spaces are more pieces the next time; those that know where a word ends are the same."""
    for name, decoder in (("spaces", None), ("bytes", ByteLevelDecoder())):
        tokenizer = Tokenizer(BPE({letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        if decoder is not None:
            tokenizer.decoder = decoder
        tokenizer.save(str(tmp_path / name))
        assert gives_back(tmp_path / name) is (decoder is not None)


def test_tokens_are_counted_again_from_the_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))
    count = load_counter(path.parent)
    honest = sample(1.0, text="a b a", output_tokens=3, finish="length")
    stopped = sample(1.0, text="a b", output_tokens=3, finish="stop")
    inflated = sample(1.0, text="a b", output_tokens=4, finish="length")
    silent = sample(1.0, text="a", output_tokens=None)
    found = check_tokens([honest, stopped, inflated, silent, sample(error="timeout", text="a a a")], count)
    assert (found.reported, found.retokenised, found.num_unreported, found.num_differing) == (10, 8, 1, 1)
    assert check_tokens([honest], None).retokenised is None
