"""The search for a topology's limit, against limits that are known."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from decide_records import ONE, cell, copies, record, split
from hypothesis import given
from hypothesis import strategies as st

from baton.bench import SettingError
from baton.bench.decide import RateGrid, Sweep, SweepPlan
from baton.bench.decide.cells import CellPlan
from baton.bench.decide.record import Cell, DecideRecord
from baton.bench.decide.search import RateSearch

GRID = RateGrid(1.0, step=1.2, stride=2, reach=12)


@given(st.floats(0.15, 7.0))
def test_the_limit_is_between_neighbours_of_the_grid(limit_rps: float) -> None:
    search, num = RateSearch(GRID), 0
    while (place := search.proposal()) is not None:
        search.note(place, met=GRID.rate_rps(place) <= limit_rps)
        num += 1
    assert search.low is not None
    assert search.high is not None
    assert search.high - search.low == 1
    assert GRID.rate_rps(search.low) <= limit_rps < GRID.rate_rps(search.high)
    assert num <= 9


def test_a_limit_far_away_is_found_in_few_steps() -> None:
    search, num = RateSearch(RateGrid(1.0, step=1.1)), 0
    while (place := search.proposal()) is not None:
        search.note(place, met=1.1**place <= 12.0)
        num += 1
    assert search.edges == (26, 27)
    assert num <= 10


@pytest.mark.parametrize(("met", "edge"), [(True, 12), (False, -12)])
def test_a_limit_out_of_reach_ends_the_search(met: bool, edge: int) -> None:
    search = RateSearch(GRID)
    while (place := search.proposal()) is not None:
        search.note(place, met=met)
    assert search.edges == (edge,)


@given(st.lists(st.booleans(), max_size=60))
def test_contradictions_do_not_keep_it_going(answers: list[bool]) -> None:
    search = RateSearch(GRID)
    for met in answers:
        place = search.proposal()
        if place is None:
            break
        search.note(place, met=met)
    else:
        assert len(answers) <= 25


@pytest.mark.parametrize(("field", "value"), [("start_rps", 0.0), ("step", 1.0), ("stride", 0), ("reach", 1)])
def test_a_grid_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(SettingError, match=field):
        RateGrid(**({"start_rps": 1.0, "step": 1.2, "stride": 2, "reach": 12} | {field: value}))  # type: ignore[arg-type]


LIMITS = {"one": 1.0, "copies": 2.0, "split-1-1": 3.0}


@contextmanager
def silent(text: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


def swept(plan: SweepPlan, limits_rps: dict[str, float]) -> tuple[DecideRecord, list[int]]:
    """What a sweep measures of topologies that break where they are told to; and how many cells each saved record had."""
    saved: list[int] = []

    async def measure(asked: CellPlan, *_: object) -> Cell:
        share = 1.0 if asked.rate_rps <= limits_rps[asked.topology] else 0.0
        return cell(
            asked.topology, asked.rate_rps, share, num=asked.num_requests, number=asked.number, phase=asked.phase, round=asked.round, seed=asked.seed
        )

    empty = record((ONE, copies(), split()), [])
    sweep = Sweep(plan, empty, dict.fromkeys(limits_rps), _Setting(), silent, lambda found: saved.append(len(found.cells)), measure)  # type: ignore[arg-type]
    return asyncio.run(sweep.run()), saved


class _Setting:
    targets = record((), []).targets


def test_a_sweep_brackets_each_and_repeats_the_contenders() -> None:
    found, saved = swept(SweepPlan(GRID, cell_s=10.0, num_repeats=2), LIMITS)
    assert saved == list(range(1, len(found.cells) + 1))
    for name, limit in LIMITS.items():
        cells = found.cells_of(name)
        assert max(each.rate_rps for each in cells if each.num_good) <= limit < min(each.rate_rps for each in cells if not each.num_good)
    repeated = {each.topology for each in found.cells if each.phase == "repeat"}
    assert repeated == set(LIMITS)
    best = max(each.rate_rps for each in found.cells if each.num_good)
    assert {each.rate_rps for each in found.cells if each.phase == "repeat" and each.topology != "split-1-1"} == {best}, "under the best's load"
    assert sum(each.phase == "repeat" for each in found.cells) == 2 * 2 + 2 + 1, "no third time for who was far from carrying it twice"


def test_the_limit_of_one_that_cannot_win_is_bracketed_and_no_more() -> None:
    found, _ = swept(SweepPlan(GRID, cell_s=10.0, num_repeats=0), {"one": 0.2, "copies": 3.0, "split-1-1": 3.1})
    phases = {name: {each.phase for each in found.cells_of(name)} for name in ("one", "copies", "split-1-1")}
    assert phases["one"] == {"bracket"}
    assert phases["copies"] == phases["split-1-1"] == {"bracket", "bisect"}


def test_turns_change_their_order_and_cells_of_a_round_share_their_seed() -> None:
    found, _ = swept(SweepPlan(GRID, cell_s=10.0, num_repeats=2), {"one": 2.0, "copies": 2.0, "split-1-1": 2.0})
    first = {each.round: each.topology for each in reversed(found.cells)}
    assert {first[0], first[1]} == {"one", "split-1-1"}
    for number in first:
        assert len({each.seed for each in found.cells if each.round == number}) == 1
    assert len({each.seed for each in found.cells}) == len(first)


@pytest.mark.parametrize(("rate_rps", "num"), [(10.0, 100), (1.0, 20), (0.5, 15), (0.01, 8)])
def test_a_cell_at_a_low_rate_is_longer_but_not_endless(rate_rps: float, num: int) -> None:
    assert SweepPlan(GRID, cell_s=10.0, min_requests=20).num_requests(rate_rps) == num


def test_a_spent_budget_leaves_the_first_round_and_a_note() -> None:
    found, _ = swept(SweepPlan(GRID, cell_s=10.0, num_repeats=5, budget_s=1e-9), LIMITS)
    assert [each.topology for each in found.cells] == list(LIMITS)
    assert ["cut short" in note for note in found.notes] == [True]
