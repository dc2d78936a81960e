"""What a connection over a network stands on: addresses and ports of this host. It is lost with any of them, long before TCP finds out."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.kvtransfer.ucx import devices

#: A lane of UCX's description of an endpoint, as "lane[0]:  3:tcp/eth0.0 md[2]": transport, device, path.
_LANE = re.compile(r"lane\[\d+\]:\s*\d+:\w+/(\S+?)\.\d+\s")


@dataclass(frozen=True, slots=True)
class Foothold:
    """device: its name. address: what it is reached at; "": it is an InfiniBand port, and `port` says which."""

    device: str
    address: str
    port: int = 0

    def __str__(self) -> str:
        return f"address {self.address} of network device {self.device}" if self.address else f"port {self.device}"

    def is_there(self, system: Path = Path("/")) -> bool:
        """Whether the host still has it: microseconds. True where that cannot be told."""
        if not self.address:
            return (self.device, self.port) in devices.ports(system)
        try:
            with socket.socket(socket.AF_INET6 if ":" in self.address else socket.AF_INET, socket.SOCK_DGRAM) as asker:
                asker.bind((self.address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
        return True


def of(info: str, system: Path = Path("/")) -> tuple[Foothold, ...]:
    """Of an endpoint, from UCX's description of it. What has neither an address nor a port here (memory, a GPU) is left out."""
    ports = dict(devices.ports(system))
    found = []
    for name in dict.fromkeys(_LANE.findall(info)):
        if name in ports:
            found.append(Foothold(name, "", ports[name]))
        elif address := devices.address_of(name, system):
            found.append(Foothold(name, address))
    return tuple(found)


def missing(footholds: Iterable[Foothold]) -> str:
    """Which of them are gone, in words; "": none."""
    return ", ".join(str(foothold) for foothold in footholds if not foothold.is_there())
