"""Ports that one machine cannot give twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: Addresses that stand for every interface.
_ANY = frozenset({"0.0.0.0", "::"})


class Port(NamedTuple):
    """A port that is to be listened on. flag: what sets it, for messages. number 0: the system chooses."""

    flag: str
    host: str
    number: int

    def collides(self, other: Port) -> bool:
        """Whether only one of the two can be had. Two names of one address pass for two."""
        return self.number != 0 and self.number == other.number and (self.host == other.host or bool(_ANY & {self.host, other.host}))


def check_ports(ports: Iterable[Port]) -> None:
    """Raises ValueError where two ports are one, which would be found only when the service has loaded everything."""
    taken: list[Port] = []
    for port in ports:
        for other in taken:
            if port.collides(other):
                raise ValueError(f"{other.flag} and {port.flag} are both {port.number}: give each a port of its own, or 0, and the system chooses")
        taken.append(port)
