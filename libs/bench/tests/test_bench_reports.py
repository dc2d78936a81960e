"""Run files, summaries, comparisons and their Markdown, over samples that are written by hand."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import baton.bench
from baton.bench.compare_runs import compare_runs
from baton.bench.errors import BenchFileError, SettingError
from baton.bench.generator import Measured
from baton.bench.markdown import comparison_markdown, summary_markdown
from baton.bench.measures import Objectives
from baton.bench.runfile import Run, RunHeader, RunWriter, load_run
from baton.bench.sample import Sample
from baton.bench.summary import figures_of, summarise

HEADER = RunHeader(
    name="split",
    target="grpc://host:1 (completions)",
    model="m",
    workload={"workload": "chat", "seed": 1},
    arrivals="closed loop, 2 clients",
    num_requests=5,
    num_warm_up=1,
    num_repeats=2,
    session="s",
    started_at="2026-01-01T00:00:00+00:00",
    machine="a machine",
)


def made(index: int, repeat: int = 0, ttft_s: float = 0.1, gap_s: float = 0.02, **fields: object) -> Sample:
    sent_s = float(index)
    token_s = tuple(sent_s + ttft_s + number * gap_s for number in range(6))
    base = Sample(
        repeat=repeat,
        index=index,
        kind="chat",
        is_long=False,
        is_warm_up=False,
        prompt_words=7,
        max_tokens=6,
        scheduled_s=sent_s,
        sent_s=sent_s,
        ended_s=token_s[-1] + 0.01,
        token_s=token_s,
        token_counts=(1,) * 6,
        text="six words that make a text",
        output_tokens=6,
        finish="length",
    )
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def run_of(name: str = "split", num_repeats: int = 4, slower: float = 1.0, **header: object) -> Run:
    samples = [made(index, repeat, 0.1 * slower * (1 + 0.01 * index), 0.02 * slower) for repeat in range(num_repeats) for index in range(5)]
    return Run(dataclasses.replace(HEADER, name=name, num_repeats=num_repeats, **header), tuple(samples), (0.0001,) * 50)  # type: ignore[arg-type]


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run.jsonl", HEADER)
    warm = made(0, is_warm_up=True)
    samples = [made(1), made(2, error="timeout", error_detail="no end", server={"kv_bytes": 5.0}, output_tokens=None)]
    writer.add(0, [warm, *samples], Measured(loop_lag_s=[0.001, 0.002]))
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 5, "a repeat is on disk before the run is closed"
    writer.add(1, [made(1, repeat=1)], Measured(loop_lag_s=[0.003]))
    writer.close()
    run = load_run(tmp_path / "run.jsonl")
    assert run.header == HEADER
    assert run.loop_lag_s == (0.001, 0.002, 0.003)
    assert [(sample.repeat, sample.index) for sample in run.samples] == [(0, 1), (0, 2), (1, 1)]
    assert [Sample.from_json(json.loads(json.dumps(sample.to_json()))) for sample in run.samples] == list(run.samples)


@given(st.floats(0, 1e4), st.lists(st.floats(0, 1e4), max_size=5), st.text(max_size=20))
def test_a_sample_survives_json_to_the_microsecond(sent_s: float, token_s: list[float], text: str) -> None:
    before = made(0, sent_s=sent_s, token_s=tuple(token_s), token_counts=(1,) * len(token_s), text=text)
    after = Sample.from_json(json.loads(json.dumps(before.to_json())))
    assert after.sent_s == pytest.approx(sent_s, abs=1e-6)
    assert after.token_s == pytest.approx(tuple(token_s), abs=1e-6)
    assert (after.text, after.token_counts) == (text, before.token_counts)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "is empty"),
        (["x"], r"run:1 is not JSON"),
        (["[]"], "holds a list"),
        (['{"record": "sample"}'], "begins with record 'sample'"),
        (['{"record": "run", "version": 99}'], "version 99"),
        (['{"record": "run", "version": 1}'], "has other fields"),
        ([json.dumps({"record": "run", "version": 1} | dataclasses.asdict(HEADER)), '{"record": "poem"}'], "run:2: record is 'poem'"),
        ([json.dumps({"record": "run", "version": 1} | dataclasses.asdict(HEADER)), '{"record": "sample"}'], "other fields"),
    ],
)
def test_a_bad_run_file_is_named_with_its_line(tmp_path: Path, lines: list[str], named: str) -> None:
    path = tmp_path / "run"
    path.write_text("\n".join(lines))
    with pytest.raises(BenchFileError, match=named):
        load_run(path)


def test_a_summary_says_what_the_samples_say() -> None:
    run = run_of(num_repeats=2)
    failed = made(9, error="unavailable", token_s=(), token_counts=(), output_tokens=None, text="")
    found = summarise(dataclasses.replace(run, samples=(*run.samples, failed)), Objectives(103.5, 30), lambda text: len(text.split()))
    assert (found.num_requests, found.num_failed, found.errors) == (11, 1, {"unavailable": 1})
    assert found.latencies.ttft_ms is not None
    assert found.latencies.itl_ms is not None
    assert found.latencies.ttft_ms.p50 == pytest.approx(102.0)
    assert (found.latencies.itl_ms.num, found.latencies.itl_ms.p99) == (50, pytest.approx(20.0))
    assert (found.tokens.reported, found.tokens.retokenised, found.tokens.num_differing) == (60, 60, 0)
    assert found.goodput is not None
    assert (found.goodput.num_good, found.goodput.share) == (8, pytest.approx(8 / 11))
    assert found.spread["TTFT p50 ms"].median == pytest.approx(102.0)
    assert found.flags[0].startswith("1 of 11 requests failed")
    json.dumps(dataclasses.asdict(found))


def test_what_speaks_against_a_run_is_said_before_its_figures() -> None:
    inflated = Run(HEADER, (made(0, output_tokens=9), made(1, sent_s=1.09)), (0.08,) * 20)
    text = summary_markdown(summarise(inflated, None, lambda text: len(text.split())))
    before, after = text.split("## Output tokens")
    for flag in (
        "sent late",
        "stamped late",
        "1 answers hold another number of tokens than reported (12 in the texts, 15 reported)",
        "p99 of TTFT rests on 2",
    ):
        assert flag in before
    assert "12 retokenised from the texts; 15 reported; 1 answers differ." in after
    assert "give a tokenizer" in summary_markdown(summarise(inflated))


@pytest.mark.parametrize(("cached", "said"), [(None, False), (5, False), (6, True)])
def test_prompts_that_a_prefix_cache_had_are_said(cached: int | None, said: bool) -> None:
    """A second command with the same seed asks for the same prompts."""
    server = {} if cached is None else {"cached_tokens": float(cached)}
    found = summarise(Run(HEADER, tuple(made(index, prompt_tokens=10, server=server) for index in range(3)), ()))
    assert any("60% of the prompts' tokens came out of a prefix cache" in flag for flag in found.flags) is said


def test_a_run_without_any_answer_can_be_summed_up() -> None:
    failed = made(0, error="connect", token_s=(), token_counts=(), output_tokens=None)
    text = summary_markdown(summarise(Run(HEADER, (failed,), ()), Objectives(1, 1)))
    assert "1 of 1 requests failed" in text
    assert "| TTFT | 0 |" in text


def test_markdown_has_every_measure() -> None:
    run = run_of(num_repeats=2)
    long = made(2, 1, is_long=True, server={"kv_bytes": 4096.0})
    text = summary_markdown(summarise(dataclasses.replace(run, samples=(*run.samples[:-3], long)), Objectives(100, 30)))
    for part in (
        "TTFT",
        "ITL (every gap)",
        "TPOT",
        "end to end",
        "1 long prompts",
        "goodput (TTFT at most 100 ms",
        "kv_bytes | 1 | 4,096",
        "Spread",
        "own lag",
    ):
        assert part in text


def test_figures_are_absent_where_nothing_was_measured() -> None:
    assert figures_of([made(0, error="timeout", token_s=(), token_counts=())]) == {}


def test_ratios_pair_requests_and_repeats() -> None:
    found = compare_runs(run_of("slow", slower=1.5), run_of("fast"))
    assert found.flags == ()
    rows = {(row.metric, row.pairs_of): row.found for row in found.rows}
    assert (rows["TTFT ms", "requests"].num_pairs, rows["ITL p99 ms", "repeats"].num_pairs) == (20, 4)
    for metric in (("TTFT ms", "requests"), ("p99 ITL of a request ms", "requests"), ("TTFT p99 ms", "repeats"), ("ITL p99 ms", "repeats")):
        assert rows[metric].ratio == pytest.approx(1.5)
    text = comparison_markdown(found)
    assert "# slow over fast" in text
    assert "1.500 (1.500 to 1.500)" in text


def test_what_weakens_a_comparison_is_flagged() -> None:
    other = run_of("b", num_repeats=2, session="t", arrivals="Poisson, 1 requests/s", model="n")
    broken = dataclasses.replace(other, samples=(*other.samples[:-1], dataclasses.replace(other.samples[-1], error="timeout")))
    flags = " / ".join(compare_runs(run_of("a", num_repeats=2), broken).flags)
    for part in ("not measured in turns", "arrivals differ", "models differ", "b: 1 of 10 requests failed; 9 pairs are left", "fewer than 4 repeats"):
        assert part in flags


def test_runs_of_other_requests_are_not_compared() -> None:
    with pytest.raises(SettingError, match=r"workload is .* but only runs of the same requests"):
        compare_runs(run_of(), run_of("b", workload={"workload": "chat", "seed": 2}))
    with pytest.raises(SettingError, match="both runs answered 0 requests, but a comparison needs at least 4"):
        compare_runs(run_of(), dataclasses.replace(run_of("b"), samples=()))


def test_the_face_of_the_package_is_sorted_and_there() -> None:
    assert baton.bench.__all__ == sorted(baton.bench.__all__)
    assert all(hasattr(baton.bench, name) for name in baton.bench.__all__)
