"""The routes of a fleet that changes, against the definition of a route, whatever happens in whatever order."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from baton.gateway.compatibility import differences
from baton.gateway.fleet import Fleet
from baton.gateway.worker import ROLES, Leg, Worker
from baton.wire.v1 import common_pb2, worker_pb2

PLACES = [(Leg.PREFILL, 0), (Leg.PREFILL, 1), (Leg.DECODE, 2), (Leg.DECODE, 3), (Leg.PLAIN, 4)]


class Place:
    """A worker, and what the fleet told it last."""

    def __init__(self, number: int) -> None:
        self.leg, self.number = PLACES[number]
        self.worker = Worker(f"10.0.0.{number}:1", self.leg, min_vocab_size=1, stall_limit_s=30)
        self.told: list[str] | None = None
        self.worker.outbox.put_peers = self._tell  # type: ignore[method-assign]

    def _tell(self, addresses: list[str]) -> None:
        self.told = addresses

    @property
    def bootstrap(self) -> str:
        return f"10.0.0.{self.number}:9"

    def info(self, run: int, page_size: int) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            instance_id=f"{self.leg.value}-{self.number}-{run}",
            role=ROLES[self.leg],
            max_model_len=100,
            fingerprint=common_pb2.KVFingerprint(page_size=page_size),
            bootstrap_address=self.bootstrap if self.leg is Leg.PREFILL else "",
            load=worker_pb2.WorkerLoad(total_pages=10, free_pages=10),
        )


def expected_routes(places: dict[int, Place]) -> set[tuple[Worker, ...]]:
    """By definition: plain servers that are of use, and pairs of such that fit and are connected to each other's present process."""
    usable = [place.worker for place in places.values() if not place.worker.unusable_because]
    plain = {(worker,) for worker in usable if worker.leg is Leg.PLAIN}
    pairs = {
        (prefill, decode)
        for prefill in usable
        for decode in usable
        if prefill.leg is Leg.PREFILL and decode.leg is Leg.DECODE
        and not differences(prefill.info, decode.info)  # type: ignore[arg-type]
        and decode.path_to(prefill).prefill_instance_id == prefill.instance_id
    }  # fmt: skip
    return plain | pairs


def expected_peers(places: dict[int, Place], decode: Worker) -> list[str]:
    known = [place.worker for place in places.values() if place.leg is Leg.PREFILL and place.worker.info is not None]
    return sorted(worker.info.bootstrap_address for worker in known if not differences(worker.info, decode.info))  # type: ignore[union-attr, arg-type]


steps = st.tuples(
    st.sampled_from(["add", "drop", "came", "came", "went", "peers", "peers", "draining", "stalled", "leave", "stay"]),
    st.integers(0, 4),
    st.integers(0, 3),
)


#: Where everybody is there, fits and is connected: changes of a fleet that serves.
WHOLE = [("add", number, 0) for number in range(5)] + [("came", number, 0) for number in range(5)] + [("peers", number, 1) for number in (2, 3)]


@given(st.sampled_from([[], WHOLE]), st.lists(steps, min_size=8, max_size=30))
@example(WHOLE, [("went", 2, 0), ("came", 2, 0), ("peers", 2, 1)])
@example(WHOLE, [("went", 0, 0), ("came", 0, 2), ("peers", 2, 3)])
def test_routes_and_peers_are_what_they_should_be_after_every_change(first: list[tuple[str, int, int]], then: list[tuple[str, int, int]]) -> None:
    verdicts: list[bool] = []
    fleet, places, gone = Fleet(verdicts.append), dict[int, Place](), list[str]()
    fleet.on_instance_gone = gone.append
    for what, number, variant in [*first, *then]:
        place = places.get(number)
        if what == "add" and place is None:
            place = places[number] = Place(number)
            fleet.add(place.worker)
        elif place is None:
            continue
        elif what == "drop":
            del places[number]
            fleet.drop(place.worker)
            assert not place.worker.instance_id or gone[-1] == place.worker.instance_id
        else:
            _change(place, what, variant)
        assert {route.servers for route in fleet.routes} == expected_routes(places)
        assert len(fleet.routes) == len({route.servers for route in fleet.routes})
        assert fleet.ready == bool(fleet.routes) == (bool(verdicts) and verdicts[-1])
        for one in places.values():
            if one.leg is Leg.DECODE and one.worker.connected:
                assert one.told == expected_peers(places, one.worker)
    assert all(before is not after for before, after in itertools.pairwise(verdicts))  # told of changes only


def _change(place: Place, what: str, variant: int) -> None:
    worker = place.worker
    match what:
        case "came":
            worker.came(place.info(variant // 2, page_size=16 + variant % 2))
        case "went":
            worker.went("gone")
            place.told = None  # the next session is told anew
        case "leave":
            worker.leave("as the test says", lambda gone: None)
        case "stay":
            worker.stay()
        case _ if worker.connected:
            _take(worker, _report(worker, what, variant))


def _report(worker: Worker, what: str, variant: int) -> worker_pb2.Report:
    report = worker_pb2.Report(draining=worker.draining)
    if what == "draining":
        report.draining = bool(variant % 2)
    elif what == "stalled":
        report.load.CopyFrom(worker_pb2.WorkerLoad(total_pages=10, stalled_s=60.0 if variant % 2 else 0.0))
    elif worker.leg is Leg.DECODE:
        states = [
            worker_pb2.PeerState(bootstrap_address=f"10.0.0.{number}:9", prefill_instance_id=f"prefill-{number}-{variant // 2}") for number in (0, 1)
        ]
        report.peers.CopyFrom(worker_pb2.PeerStates(peers=states[: 1 + variant % 2]))
    return report


def _take(worker: Worker, report: worker_pb2.Report) -> Any:
    worker.take(report)
    worker.hand_out(1)
