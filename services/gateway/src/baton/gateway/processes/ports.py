"""Ports that several processes of one gateway listen on together, kept from everybody else."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from baton.servicekit import AddressUnavailableError, join_address

#: The host's addresses that a name stands for may be of a family that this machine does not have.
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class HeldPort:
    """One port of `host`, bound and never listened on: it gets no connection.

    It is bound alone, so that a port which anybody else listens on is refused, and shared (SO_REUSEPORT) from then on: processes of the same
    user may listen on it, and none that asks for it alone.
    """

    def __init__(self, host: str, port: int, flag: str) -> None:
        """`port` 0 lets the system choose. Blocks for the name's look-up. Raises AddressUnavailableError, which names `flag`."""
        self._sockets: list[socket.socket] = []
        self.port = port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((one[0], str(one[4][0])) for one in found):
                self._hold(family, address)
            if not self._sockets:
                raise OSError(errno.EADDRNOTAVAIL, "no address of that host is this machine's")
        except OSError as error:
            self.close()
            text = f"cannot listen on {join_address(host, port)}: {error.strerror or error}; choose another --host or {flag}"
            raise AddressUnavailableError(text) from error

    def _hold(self, family: int, address: str) -> None:
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may linger
            held.bind((address, self.port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # from now on nobody passes who does not share
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as error:
            held.close()
            if error.errno not in _ABSENT:
                raise
            return
        self._sockets.append(held)
        self.port = held.getsockname()[1]

    def close(self) -> None:
        """Idempotent."""
        while self._sockets:
            self._sockets.pop().close()


def hold(*wanted: tuple[str, int, str]) -> tuple[list[HeldPort], Callable[[], None]]:
    """All of (host, port, flag) or none, and what lets go of them. Raises AddressUnavailableError."""
    held: list[HeldPort] = []

    def close() -> None:
        for one in held:
            one.close()

    try:
        for host, port, flag in wanted:
            held.append(HeldPort(host, port, flag))
    except AddressUnavailableError:
        close()
        raise
    return held, close
