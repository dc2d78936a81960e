"""A part of docs/failures.md driven again, and the document itself. All of it: `python -m tests.faults --check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.cells import CUTS, FAULTS, KILLS, STATES, FaultFleet, Outcome, drive, fault_fleet, restore
from faults.moved import Moved, Scrapes, expected_of
from faults.net import why_not
from faults.table import OR, differences, merged, read, write

pytestmark = [pytest.mark.integration, pytest.mark.long]

#: Each kind of process killed in each state, and a cut of a control path and of the path of KV pages.
CELLS = [*((kill, state) for kill in KILLS for state in STATES), ("cut gateway-decode", "WAITING"), ("cut prefill-decode", "TRANSFERRING")]


@pytest.fixture(scope="module")
def fleet(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFleet]:
    reason = why_not()
    if reason:
        pytest.skip(f"faults between network namespaces: {reason}")
    with fault_fleet(FaultFleet, model_path, tmp_path_factory.mktemp("cells")) as fleet:
        yield fleet


@pytest.mark.parametrize(("fault", "state"), CELLS, ids=[f"{fault} in {state}" for fault, state in CELLS])
def test_a_cell_is_as_the_document_says_and_moves_just_those_counters(fleet: FaultFleet, fault: str, state: str) -> None:
    scrapes = Scrapes({name: fleet.party(name) for name in ("gateway", "prefill", "decode")})
    outcome = drive(fleet, fault, state)
    killed = [fault.removeprefix("kill ")] if fault.startswith("kill ") else []
    try:
        scrapes.wait_for(expected_of(outcome.counted, state) + aside(outcome), *killed, may=first_noticed(outcome))
    finally:
        restore(fleet)
    assert not differences(read(), [outcome])


def aside(outcome: Outcome) -> Moved:
    """What moves beside the failures that the document names: pages whose writer is gone are quarantined until it is fenced. And a stream that goes
    on in spite of the fault is ended by its client when enough of it was seen."""
    moved: Moved = Counter()
    if outcome.state in ("WAITING", "TRANSFERRING") and outcome.fault in ("kill prefill", "cut prefill-decode"):
        moved["decode", "baton_leases_quarantined_total", ""] += 1
    if outcome.client == "stream goes on":
        for service in ("gateway", "decode"):
            moved[service, "baton_rooms_failed_total", "client_gone (client)"] += 1
    return moved


def first_noticed(outcome: Outcome) -> Moved:
    """Whether prefill hears from its writes or from its session first that decode is gone is chance."""
    writes = outcome.state in ("WAITING", "TRANSFERRING") and outcome.fault in ("kill decode", "cut prefill-decode")
    return Counter({("prefill", "baton_writes_failed_total", ""): 1}) if writes else Counter()


def test_a_short_stop_is_not_noticed(fleet: FaultFleet) -> None:
    """Shorter than a sign of life is waited for where there is no other server."""
    outcome = drive(fleet, "stop decode", "TRANSFERRING", stop_s=1.5)
    restore(fleet)
    assert (outcome.client, outcome.counted) == ("answered", "nothing")


def test_the_document_is_whole_and_every_failure_in_it_has_an_author() -> None:
    cells = read()
    assert set(cells) == {(fault, state) for fault in FAULTS for state in STATES}
    for (fault, state), outcome in cells.items():
        assert all(outcome.facts), f"{fault} in {state}: {outcome.facts}"
        for client in outcome.client.split(OR):
            assert client.split(" ")[0] in ("answered", "stream", "(gone)", "UNAVAILABLE", "DEADLINE_EXCEEDED"), f"{fault} in {state}: {client}"
            undetailed = client.endswith("from its own gRPC")
            assert not undetailed or "gateway" in fault, f"{fault} in {state}: only a lost gateway has no word for its client, not {client}"
        if fault in (*KILLS, *CUTS):
            assert "when it goes on" not in outcome.pages


def test_a_cell_that_differs_is_told_and_alternatives_are_kept(tmp_path: Path) -> None:
    first = Outcome("kill decode", "WAITING", "UNAVAILABLE decode_lost (decode, WAITING)", "gateway: decode_lost (decode)", "at once", 0.5, 1.0)
    second = Outcome("kill decode", "WAITING", "answered", "nothing", "with the answer's end", None, 2.0)
    path = tmp_path / "table.md"
    write(merged({}, [first]), path)
    assert not differences(read(path), [first])
    assert "seen ('answered'" in differences(read(path), [second])[0]
    write(merged(read(path), [second]), path)
    assert not differences(read(path), [first, second])


def test_what_does_not_differ_between_alternatives_is_said_once(tmp_path: Path) -> None:
    told = "UNAVAILABLE decode_lost (decode, WAITING)"
    first = Outcome("cut gateway-decode", "WAITING", told, "gateway: decode_lost (decode); decode: decode_lost (decode)", "at once", 0.5, 1.0)
    second = Outcome("cut gateway-decode", "WAITING", told, "gateway: decode_lost (decode); decode: gateway_lost (gateway)", "at once", 0.5, 1.0)
    path = tmp_path / "table.md"
    write(merged({}, [first, second]), path)
    assert read(path)[first.key].client == told
    assert not differences(read(path), [first, second])
    assert differences(read(path), [Outcome(*first.key, told, first.counted, "while the fault lasts")])


def test_no_client_of_a_gateway_that_lives_is_told_that_it_is_lost() -> None:
    for (fault, state), outcome in read().items():
        assert fault == "kill gateway" or "gateway_lost" not in outcome.client, f"{fault} in {state}: {outcome.client}"
