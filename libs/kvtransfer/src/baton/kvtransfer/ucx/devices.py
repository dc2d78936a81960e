"""Which network devices UCX would find now. A context keeps those it found when it was made (native/context.hpp): this says when it is stale."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915
_UP_AND_RUNNING = 0x1 | 0x40
#: `struct ifreq`: the name, then what is asked for.
_REQUEST = struct.Struct("16s24x")
_FLAGS = struct.Struct("16xH")
_ADDRESS = struct.Struct("20x4s")
_LINK_SCOPE = "20"


def find(chosen: str = "", system: Path = Path("/")) -> frozenset[str]:
    """Interfaces that are up, run and have an address beyond their link, and active ports of InfiniBand devices. One that was taken away and made
    again under its name is another one.

    chosen: UCX's NET_DEVICES; what it leaves out is left out here where it is a plain list of names.
    """
    names = {name.strip() for name in chosen.split(",")} if chosen and chosen != "all" and not set(chosen) & set("^[") else None
    found = (*_interfaces(system), *ports(system))
    return frozenset(f"{name}#{number}" for name, number in found if names is None or name in names)


def _interfaces(system: Path) -> Iterator[tuple[str, int]]:
    with_ipv6 = {name for _, name in _ipv6(system / "proc/net/if_inet6")}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for number, name in socket.if_nameindex():
            request = _REQUEST.pack(name.encode())
            try:
                (flags,) = _FLAGS.unpack_from(fcntl.ioctl(asker, _GET_FLAGS, request))
            except OSError:
                continue  # it went while we looked
            if flags & _UP_AND_RUNNING == _UP_AND_RUNNING and (name in with_ipv6 or _has_ipv4(asker, request)):
                yield name, number


def _has_ipv4(asker: socket.socket, request: bytes) -> bool:
    try:
        fcntl.ioctl(asker, _GET_ADDRESS, request)
    except OSError:
        return False
    return True


def _ipv6(table: Path) -> list[tuple[str, str]]:
    """(address, name) of every one beyond its link. Lines of: address, index, prefix, scope, flags, name. Empty where the kernel has no IPv6."""
    try:
        rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()]
    except FileNotFoundError:
        return []
    return [(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])), row[5]) for row in rows if row[3] != _LINK_SCOPE]


def ports(system: Path = Path("/")) -> set[tuple[str, int]]:
    """Active ports of InfiniBand devices, as UCX names them, and what tells one from another that has its name later."""
    return set(_ports(system))


def address_of(name: str, system: Path = Path("/")) -> str:
    """What UCX's tcp takes of an interface: its IPv4 address, else one of IPv6 beyond its link; "": it has none, or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answer = fcntl.ioctl(asker, _GET_ADDRESS, _REQUEST.pack(name.encode()))
        except OSError:
            return next((row[0] for row in _ipv6(system / "proc/net/if_inet6") if row[1] == name), "")
    return socket.inet_ntop(socket.AF_INET, _ADDRESS.unpack_from(answer)[0])


def _ports(system: Path) -> Iterator[tuple[str, int]]:
    for state in (system / "sys/class/infiniband").glob("*/ports/*/state"):
        port = state.parent
        try:
            if "ACTIVE" in state.read_text(encoding="ascii"):
                yield f"{port.parent.parent.name}:{port.name}", port.parent.parent.stat().st_ino
        except OSError:
            continue  # it went while we looked
