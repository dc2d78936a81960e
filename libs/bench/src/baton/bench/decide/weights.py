"""Whether servers ran on random weights, by their commands. Pure."""

from collections.abc import Sequence
from itertools import pairwise

from baton.bench.decide.record import DecideRecord

FLAG = "--load-format"


def are_dummy(command: Sequence[str]) -> bool:
    """Of several, the last flag counts, as it does for the server."""
    given = [value for part, following in pairwise((*command, "")) if (value := _value(part, following)) is not None]
    return bool(given) and given[-1] == "dummy"


def _value(part: str, following: str) -> str | None:
    if part == FLAG:
        return following
    return part.removeprefix(f"{FLAG}=") if part.startswith(f"{FLAG}=") else None


def has_dummy_weights(record: DecideRecord) -> bool:
    """Their texts are random: tokens counted again from them say nothing about what the server reported."""
    return any(are_dummy(server.command) for server in record.servers)
