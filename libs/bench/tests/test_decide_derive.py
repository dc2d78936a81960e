"""Objectives, chunk and the start of the search from idle servers; salted requests; who ended a request; shares of cells."""

import pytest
from decide_records import cell, idle

from baton.bench import SettingError, WorkloadOptions, build_workload
from baton.bench.decide import Shape, chunk_tokens, start_rps, targets_of
from baton.bench.decide.cells import CellPlan, authors, met, salted
from baton.bench.decide.derive import prompt_token_ms
from baton.bench.request import Message, Request
from baton.bench.sample import Sample

#: 40 ms and 3 ms a token, steps of 50 ms.
IDLE = [idle("split-1-1", tokens, 40.0 + 3 * tokens, itl_ms=50.0) for tokens in (20, 200)]


def test_objectives_that_were_not_given_follow_idle_servers() -> None:
    found = targets_of(IDLE, None, None, 0.9, None)
    assert (found.ttft_ms, found.itl_p99_ms) == (1900.0, 150.0)
    assert "3 times that of an idle server for 200 tokens" in found.source


def test_objectives_that_were_given_stand() -> None:
    found = targets_of(IDLE, 123.0, 45.0, 0.99, 2.0)
    assert (found.ttft_ms, found.itl_p99_ms, found.attainment, found.source, found.load_rps) == (123.0, 45.0, 0.99, "given", 2.0)


@pytest.mark.parametrize(
    ("values", "field"), [((0.0, 1.0, 0.9, None), "ttft_ms"), ((1.0, 1.0, 0.0, None), "attainment"), ((1.0, 1.0, 0.9, 0.0), "load")]
)
def test_objectives_that_cannot_be_are_refused(values: tuple[float, float, float, float | None], field: str) -> None:
    with pytest.raises(SettingError, match=field):
        targets_of(IDLE, *values)


def test_a_plain_servers_chunk_fills_half_of_what_the_streams_bear() -> None:
    assert prompt_token_ms(IDLE) == pytest.approx(3.0)
    assert chunk_tokens(IDLE, 250.0) == 32  # half of (250 - 50) / 3 is 33.3
    assert chunk_tokens([*IDLE, idle("split-1-1", 8, 50.0, concurrency=4, itl_ms=75.0)], 250.0) == 24  # half of (250 - 75) / 3 is 29.2
    assert chunk_tokens(IDLE, 51.0) == 16
    assert chunk_tokens(IDLE, 1e9) == 8192


def test_the_search_begins_below_what_the_devices_could_do_at_best() -> None:
    shape = Shape.of(build_workload(WorkloadOptions(prompt_words=12, document_words=192, document_share=0.2, answer_tokens=16)))
    assert shape.short_words < 30
    assert 120 < shape.long_words < 300
    assert shape.lengths == tuple(sorted(shape.lengths))
    best_rps = 2 * 1000 / (shape.mean_words * 3.0)
    assert 0 < start_rps(IDLE, shape, 2) < best_rps
    assert start_rps(IDLE, shape, 4) == pytest.approx(2 * start_rps(IDLE, shape, 2), rel=0.1)


def test_every_cell_asks_for_its_own_prompts_and_otherwise_the_same() -> None:
    request = Request(0, "chat", (Message("system", "be brief"), Message("user", "why?")), 5, is_long=False)
    plans = [CellPlan(number, "one", "bracket", 0, 1.0, 5, 0) for number in (3, 14)]
    first, second = (salted(request, plan.salt) for plan in plans)
    assert first.messages[0].content != second.messages[0].content
    assert first.messages[1:] == second.messages[1:] == request.messages[1:]
    assert first.messages[0].content.endswith("be brief")


def sample(error: str | None, detail: str = "") -> Sample:
    return Sample(0, 0, "chat", False, False, 5, 5, 0.0, 0.0, 1.0, error=error, error_detail=detail)


def test_who_ended_a_request_is_read_from_its_text() -> None:
    said = "no page came [transfer_timeout: ended by transfer in TRANSFERRING after 300 ms of 300 ms allowed]"
    found = authors([sample("unavailable", said), sample("unavailable", said), sample("timeout"), sample("connect", "refused"), sample(None)])
    assert found == {
        "transfer_timeout: ended by transfer in TRANSFERRING": 2,
        "ended by the load generator: its own timeout": 1,
        "connect: no author named": 1,
    }


def test_cells_meet_the_objectives_together() -> None:
    assert met([cell("x", 1.0, 0.8), cell("x", 1.0, 1.0)], 0.9)
    assert not met([cell("x", 1.0, 0.8), cell("x", 1.0, 0.9)], 0.9)
    assert not met([], 0.9)
