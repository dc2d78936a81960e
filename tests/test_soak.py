"""The soak in short: 512 clients, every kind of process killed once and stopped once, etcd restarted. Longer: `python -m tests.soak --minutes 30`."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.clients import Judgement, questions
from soak.house import Held, House
from soak.rounds import KILLED, STOPPED, Soak, _more, assert_named

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

#: In both rounds: what a process keeps of its largest batch, it has kept by the first checkpoint.
NUM_CLIENTS = 512
DEADLINE_S = 240.0


async def test_every_kind_of_process_is_killed_and_stopped_under_512_clients(model_path: Path, tmp_path: Path) -> None:
    house = House(model_path, tmp_path, DEADLINE_S)
    try:
        house.build()
        soak = Soak(house, questions(model_path, 8, seed=1, answers=(2, 3, 4)), NUM_CLIENTS, DEADLINE_S, seed=1)
        await soak.learn()
        await soak.play(())
        disturbed = await soak.play(KILLED)
        await soak.play(STOPPED)
    except BaseException:
        house.kill_all()
        raise
    said = disturbed.judgement
    assert said.total >= NUM_CLIENTS
    assert said.right > NUM_CLIENTS / 2, f"{said.right} of {said.total} answered, failed: {said.failed}"
    assert [what for what, _ in disturbed.away_s] == [str(restart) for restart in KILLED if restart.kind != "etcd" or house.etcd is not None]
    house.close()


def test_the_judges_say_no() -> None:
    for found in ("wrong", "hung", "nameless"):
        with pytest.raises(AssertionError, match=f"1 {found}: client 3"):
            assert_named(Judgement(**{found: ["client 3: as it was"]}))
    before = Held("decode-1", memory_mib=500.0, descriptors=50, threads=20, rooms=0, pages=0)
    assert not _more(before, before)
    for leak in ({"rooms": 1}, {"pages": 1}, {"descriptors": 59}, {"threads": 29}, {"memory_mib": 600.0}):
        assert (
            len(_more(before, Held(**({"name": "decode-1", "memory_mib": 500.0, "descriptors": 50, "threads": 20, "rooms": 0, "pages": 0} | leak))))
            == 1
        )
