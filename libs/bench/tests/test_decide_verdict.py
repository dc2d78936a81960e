"""Every outcome of the verdict, and what it is said to rest on, from records whose truth is known."""

import random
from dataclasses import replace

import pytest
from decide_records import ONE, cell, copies, idle, percentiles, record, split, swept

from baton.bench.decide import judge
from baton.bench.decide.markdown import decide_markdown
from baton.bench.decide.record import DecideRecord, Equality, Machine, Server, Targets, Topology
from baton.bench.decide.weights import are_dummy

PAIR = (ONE, copies(), split())


def of_limits(one: float, both: float, apart: float, **fields: object) -> DecideRecord:
    return record(PAIR, swept({"one": one, "copies": both, "split-1-1": apart}), **fields)


def test_the_split_wins_where_it_carries_more() -> None:
    verdict = judge(of_limits(1.0, 2.0, 3.0))
    assert (verdict.outcome, verdict.recommended) == ("split", "split-1-1")
    assert verdict.headline.startswith("The split pays: the split 1:1 carries")
    contest = verdict.contests[-1]
    assert (contest.subject, contest.baseline) == ("split-1-1", "copies")
    assert contest.low > 1
    assert 1.3 < contest.ratio < 1.8
    assert contest.certainty > 0.99


def test_it_says_so_when_the_split_loses() -> None:
    verdict = judge(of_limits(1.0, 3.0, 2.0))
    assert (verdict.outcome, verdict.recommended) == ("copies", "copies")
    assert verdict.headline.startswith("The split loses: 2 copies carry")


def test_one_server_wins_where_more_of_them_carry_no_more() -> None:
    """Two servers on one device, say."""
    verdict = judge(of_limits(3.0, 2.0, 1.5))
    assert (verdict.outcome, verdict.recommended) == ("one", "one")


def test_equal_topologies_are_too_close_to_call_and_the_simpler_is_recommended() -> None:
    verdict = judge(of_limits(1.0, 2.0, 2.0))
    assert (verdict.outcome, verdict.recommended) == ("too_close", "copies")
    assert "Too close to call" in verdict.headline
    assert verdict.contests[-1].low < 1 < verdict.contests[-1].high


def test_few_requests_do_not_make_a_small_difference_sure() -> None:
    """The same truth with many requests is called."""
    limits = {"one": 1.0, "copies": 2.0, "split-1-1": 2.3}
    few, many = (judge(record(PAIR, swept(limits, num=num, num_repeats=repeats))) for num, repeats in ((12, 1), (400, 4)))
    assert few.outcome == "too_close"
    assert many.outcome == "split"


def test_no_topology_meets_the_objectives() -> None:
    cells = [cell(topology.name, rate, 0.2, number=place, missed="itl") for place, rate in enumerate((0.5, 1.0)) for topology in PAIR]
    verdict = judge(record(PAIR, cells))
    assert (verdict.outcome, verdict.recommended) == ("none", "")
    assert "0.5 requests/s" in verdict.headline
    assert "itl breaks first" in verdict.headline


def test_only_the_split_meets_the_objectives_at_all() -> None:
    cells = [cell(name, rate, 0.0, missed="itl") for name in ("one", "copies") for rate in (0.5, 1.0)]
    verdict = judge(record(PAIR, [*cells, *swept({"split-1-1": 1.0})]))
    assert verdict.outcome == "split"
    assert "one server met them at no load that was measured" in verdict.headline


def test_wrong_answers_are_no_competition() -> None:
    verdict = judge(of_limits(1.0, 2.0, 3.0, equality=Equality(3, 12, ("split-1-1",))))
    assert (verdict.outcome, verdict.recommended) == ("invalid", "")
    assert "split-1-1 differ from those of one" in verdict.headline


def test_a_run_that_was_stopped_says_what_it_does_not_know() -> None:
    verdict = judge(record(PAIR, swept({"one": 1.0, "copies": 2.0})))
    assert verdict.recommended == "copies"
    assert "split-1-1: not measured, so this verdict does not know it" in verdict.reasons


def test_nothing_measured_is_no_verdict() -> None:
    assert judge(record(PAIR, [])).outcome == "invalid"


@pytest.mark.parametrize(
    ("load", "outcome", "recommended"),
    [(0.5, "one", "one"), (1.5, "copies", "copies"), (2.5, "split", "split-1-1"), (9.0, "none", "")],
)
def test_the_simplest_that_carries_the_users_load(load: float, outcome: str, recommended: str) -> None:
    verdict = judge(of_limits(1.0, 2.0, 3.0, targets=Targets(500.0, 60.0, 0.9, "given", load)))
    assert (verdict.outcome, verdict.recommended) == (outcome, recommended)


def test_a_load_at_the_limit_is_too_close_to_call() -> None:
    limits = judge(of_limits(1.0, 2.0, 3.0)).capacities
    edge = next(found for found in limits if found.topology == "split-1-1")
    verdict = judge(of_limits(1.0, 2.0, 3.0, targets=Targets(500.0, 60.0, 0.9, "given", (edge.low + edge.high) / 2)))
    assert (verdict.outcome, verdict.recommended) == ("too_close", "split-1-1")


def test_the_verdict_is_a_function_of_the_record_and_not_of_the_order_of_cells() -> None:
    found = of_limits(1.0, 2.0, 3.0)
    cells = list(found.cells)
    random.Random(3).shuffle(cells)
    assert judge(found) == judge(found)
    assert judge(replace(found, cells=tuple(cells))).outcome == judge(found).outcome


def ratios(limits: dict[str, float], missed: dict[str, str]) -> DecideRecord:
    topologies: list[Topology] = [ONE, copies(4), split(1, 3), split(2, 2), split(3, 1)]
    return record(topologies, swept({"one": 1.0, "copies": 3.0} | limits, missed=missed))


def test_the_ratio_is_found_by_moving_one_server_at_a_time() -> None:
    verdict = judge(ratios({"split-1-3": 3.5, "split-2-2": 5.0, "split-3-1": 2.0}, {"split-2-2": "itl"}))
    assert verdict.recommended == "split-2-2"
    text = "\n".join(verdict.sizing)
    assert "best ratio of prefill to decode: 2:2" in text
    assert "from decode to prefill (3:1): carries 0.4" in text
    assert "from prefill to decode (1:3): carries 0." in text
    assert "the next server should be a decode server" in text


def test_at_the_end_of_the_row_only_one_move_is_left() -> None:
    verdict = judge(ratios({"split-1-3": 5.0, "split-2-2": 3.5, "split-3-1": 2.0}, {}))
    assert sum("moving one server" in line for line in verdict.sizing) == 1
    assert "the next server should be a prefill server" in verdict.sizing[-1]


def test_reasons_name_limits_and_tails() -> None:
    text = "\n".join(judge(record(PAIR, swept({"one": 1.0, "copies": 2.0, "split-1-1": 3.0}, missed={"copies": "itl"}))).reasons)
    assert "copies: " in text
    assert "streams stutter" in text
    assert "ITL p99 30 ms while a long prompt is in prefill, 20 ms otherwise, 1.50 x" in text


class TestDiagnoses:
    def said(self, **fields: object) -> str:
        return "\n".join(judge(of_limits(1.0, 2.0, 3.0, **fields)).diagnoses)

    def test_silence_when_nothing_is_wrong(self) -> None:
        assert self.said(idle=(idle("one", 100, 100.0), idle("split-1-1", 100, 110.0, exposed_ms=5.0, transport="sysv"))) == ""

    def test_a_late_first_token_by_the_bootstrap(self) -> None:
        points = (idle("one", 100, 100.0), idle("split-1-1", 100, 200.0, bootstrap_ms=80.0, exposed_ms=5.0, transport="sysv"))
        text = self.said(idle=points)
        assert "2.00 x the 100 ms of one plain server: waiting for the bootstrap (80.0 ms)" in text
        assert "tcp" not in text

    def test_a_late_first_token_by_the_transfer(self) -> None:
        points = (idle("one", 100, 100.0), idle("split-1-1", 100, 200.0, bootstrap_ms=3.0, exposed_ms=90.0, transport="tcp"))
        text = self.said(idle=points)
        assert "transfer exposed after the last layer (90.0 ms over tcp)" in text
        assert "KV pages move over tcp" in text

    def test_a_late_first_token_by_neither(self) -> None:
        points = (idle("one", 100, 100.0), idle("split-1-1", 100, 300.0, bootstrap_ms=3.0, exposed_ms=9.0, transport="sysv"))
        assert "neither bootstrap nor transfer explains it" in self.said(idle=points)

    @pytest.mark.parametrize(
        ("failure", "said"),
        [
            ("deadline_exceeded: ended by gateway in WAITING", "before suspecting the transfer"),
            ("client_left: ended by client in SUCCESS", "the client left"),
            ("ended by the load generator: its own timeout", "--timeout-s"),
            ("kv_pool_too_small: ended by decode", "pages or rooms may have run out"),
            ("http_503: no author named", "the server's own text is in the samples"),
        ],
    )
    def test_an_abort_has_an_author(self, failure: str, said: str) -> None:
        broken = [cell("split-1-1", rate, 0.5, missed="errors", errors={"x": 7}, failures={failure: 7}) for rate in (4.0, 5.0)]
        text = "\n".join(judge(record(PAIR, [*swept({"one": 1.0, "copies": 2.0, "split-1-1": 3.0}), *broken])).diagnoses)
        assert "split-1-1: 14 requests ended by a " in text
        assert "from 4 requests/s on" in text
        assert failure in text
        assert said in text

    def test_tokens_that_do_not_add_up(self) -> None:
        wrong = cell("copies", 2.0, 1.0, tokens_reported=100, tokens_retokenised=94, num_tokens_differing=4)
        assert "copies: 4 answers hold another number of tokens" in "\n".join(judge(record(PAIR, [wrong])).diagnoses)

    def test_a_few_tokens_without_a_text_are_no_alarm(self) -> None:
        near = cell("copies", 2.0, 1.0, tokens_reported=100, tokens_retokenised=96, num_tokens_differing=4)
        verdict = judge(record(PAIR, [near]))
        assert not any("number of tokens" in line for line in verdict.diagnoses)
        assert any("copies 96 of 100 reported" in line for line in verdict.reasons)

    def test_random_texts_are_not_held_against_the_server(self) -> None:
        wrong = cell("copies", 2.0, 1.0, tokens_reported=100, tokens_retokenised=600, num_tokens_differing=40)
        servers = (Server("plain-0", "plain", "cuda:0", ("python", "--load-format=dummy", "--dtype=bfloat16")),)
        verdict = judge(record(PAIR, [wrong], servers=servers))
        assert not any("distrust" in line for line in verdict.diagnoses)
        said = [line for line in verdict.reasons if "counted again" in line]
        assert len(said) == 1
        assert said[0].startswith("output tokens were not counted again from the texts: weights are random")

    def test_a_late_generator(self) -> None:
        late = cell("copies", 2.0, 1.0, number=5, lag=("requests were sent late",))
        assert "late in 1 of 1 cells, first in cell 5: requests were sent late" in "\n".join(judge(record(PAIR, [late])).diagnoses)

    def test_a_transfer_that_waits_under_load(self) -> None:
        slow = cell("split-1-1", 2.0, 1.0, server={"transfer_exposed_ms": percentiles(300.0)})
        points = (idle("split-1-1", 100, 100.0, exposed_ms=5.0, transport="sysv"),)
        assert "pages wait for a busy sender or receiver" in "\n".join(judge(record(PAIR, [slow], idle=points)).diagnoses)

    def test_a_busy_machine_and_a_shared_device(self) -> None:
        text = self.said(machine=Machine("a cpu", 2, 1, "Linux", (), {}, 4.0), shared_device=True)
        assert "the machine was busy with other work (load average 4.0 on 2 cores, 200 % of them, before the first server was started)" in text
        busy = of_limits(1.0, 2.0, 3.0, machine=Machine("a cpu", 2, 1, "Linux", (), {}, 4.0))
        assert judge(busy).headline.endswith("repeat this when it is calm.")
        assert "servers share a device" in text


@pytest.mark.parametrize(
    ("command", "dummy"),
    [
        ("--load-format=dummy", True),
        ("--load-format dummy --dtype=bfloat16", True),
        ("--load-format=auto", False),
        ("--load-format=dummy --load-format auto", False),
        ("--model-path dummy", False),
        ("", False),
    ],
)
def test_random_weights_are_known_by_a_servers_command(command: str, dummy: bool) -> None:
    assert are_dummy(command.split()) is dummy


@pytest.mark.parametrize(("num_cores", "busy"), [(2, True), (4, True), (5, False), (32, False)])
def test_a_load_is_busy_by_the_cores_that_carry_it(num_cores: int, busy: bool) -> None:
    verdict = judge(of_limits(1.0, 2.0, 3.0, machine=Machine("a cpu", num_cores, 1, "Linux", (), {}, 1.2)))
    assert ("the machine was busy" in verdict.headline) is busy
    assert any("the machine was busy" in line for line in verdict.diagnoses) is busy


def test_the_page_begins_with_the_verdict_and_has_every_cell() -> None:
    found = of_limits(1.0, 2.0, 3.0)
    page = decide_markdown(found, judge(found))
    assert page.startswith("# The split pays")
    assert sum(line.startswith(("| one |", "| copies |", "| split-1-1 |")) for line in page.splitlines()) == len(found.cells)
