"""One answer out of those that the processes of a gateway gave to one question about the fleet. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.protobuf.message import Message

from baton.wire.v1 import fleet_pb2


def merge_lists(answers: Sequence[fleet_pb2.ListWorkersResponse]) -> fleet_pb2.ListWorkersResponse:
    """A server's rooms are those of all; it is connected, and the gateway ready, when that is so in every process."""
    whole = fleet_pb2.ListWorkersResponse()
    whole.CopyFrom(answers[0])
    whole.ready = all(answer.ready for answer in answers)
    by_place = {(state.address, state.role): state for state in whole.workers}
    for answer in answers[1:]:
        for state in answer.workers:
            known = by_place.get((state.address, state.role))
            if known is None:
                known = by_place[state.address, state.role] = whole.workers.add()
                known.CopyFrom(state)
            else:
                _add_state(known, state)
        whole.problems.extend(problem for problem in answer.problems if problem not in whole.problems)
    return whole


def _add_state(known: fleet_pb2.WorkerState, state: fleet_pb2.WorkerState) -> None:
    if not known.HasField("info") and state.HasField("info"):
        known.info.CopyFrom(state.info)
    known.sources.extend(source for source in state.sources if source not in known.sources)
    known.connected = known.connected and state.connected
    known.unusable_because = known.unusable_because or state.unusable_because
    known.leaving = known.leaving or state.leaving
    known.rooms += state.rooms


def merge_drains(answers: Sequence[fleet_pb2.DrainWorkerResponse]) -> fleet_pb2.DrainWorkerResponse:
    return fleet_pb2.DrainWorkerResponse(rooms=sum(answer.rooms for answer in answers))


def merge_removals(answers: Sequence[fleet_pb2.RemoveWorkerResponse]) -> fleet_pb2.RemoveWorkerResponse:
    return fleet_pb2.RemoveWorkerResponse(rooms=sum(answer.rooms for answer in answers))


def first(answers: Sequence[Message]) -> Message:
    """Where all say the same."""
    return answers[0]


#: Of each method: the answer's type, how several become one, and whether one process's refusal is the answer. It is not where a process may
#: not know of a server (yet) that another one does.
MERGES: dict[str, tuple[type[Message], Callable[..., Message], bool]] = {
    "/baton.v1.Registry/Register": (fleet_pb2.RegisterResponse, first, True),
    # NOT_FOUND of a process that was started anew makes the worker register again, with all of them
    "/baton.v1.Registry/Heartbeat": (fleet_pb2.HeartbeatResponse, first, True),
    "/baton.v1.Registry/Deregister": (fleet_pb2.DeregisterResponse, first, True),
    "/baton.v1.Fleet/List": (fleet_pb2.ListWorkersResponse, merge_lists, True),
    "/baton.v1.Fleet/Add": (fleet_pb2.AddWorkerResponse, first, True),
    "/baton.v1.Fleet/Drain": (fleet_pb2.DrainWorkerResponse, merge_drains, False),
    "/baton.v1.Fleet/Remove": (fleet_pb2.RemoveWorkerResponse, merge_removals, False),
}
