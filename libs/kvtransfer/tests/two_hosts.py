"""Two hosts on this machine: network namespaces, and a wire between them that can be taken away and laid again. Needs root and `ip` (iproute2)."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from typing import Self

HOSTS = ("receiver", "sender")


def why_not() -> str:
    """Why there can be none here; empty when there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (Debian: iproute2)"
    if os.geteuid():
        return "network namespaces need root"
    name = f"bkv{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


class TwoHosts:
    """Made on entry with loopback interfaces only, gone on leaving."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(3)
        self._num_wires = 0
        self._cards: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        for host in HOSTS:
            _ip("netns", "add", self._namespace(host))
            _ip("-n", self._namespace(host), "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", self._namespace(host)], capture_output=True, check=False)

    def command(self, host: str) -> tuple[str, ...]:
        """In front of a command: it runs on that host, and keeps its process number."""
        return ("ip", "netns", "exec", self._namespace(host))

    def lay(self) -> None:
        """A wire, with cards of new names and addresses."""
        self._num_wires += 1
        self._cards = tuple(f"b{self._key}{self._num_wires}{host[:1]}" for host in HOSTS)
        _ip("link", "add", "name", self._cards[0], "type", "veth", "peer", "name", self._cards[1])
        for number, (host, card) in enumerate(zip(HOSTS, self._cards, strict=True), 1):
            _ip("link", "set", card, "netns", self._namespace(host))
            _ip("-n", self._namespace(host), "addr", "add", f"10.211.{self._num_wires}.{number}/30", "dev", card)
            _ip("-n", self._namespace(host), "link", "set", card, "up")
        for host, card in zip(HOSTS, self._cards, strict=True):
            while "state UP" not in _ip("-n", self._namespace(host), "link", "show", card):
                time.sleep(0.01)

    def take_away(self) -> None:
        """The wire and both its cards, as if they had been pulled out."""
        _ip("-n", self._namespace(HOSTS[0]), "link", "del", self._cards[0])

    def lay_beside(self, network: int = 212) -> None:
        """Another device on either host, which leads nowhere. network: of its address."""
        for host in HOSTS:
            card = self.beside(host)
            _ip("-n", self._namespace(host), "link", "add", "name", card, "type", "veth", "peer", "name", f"{card}o")
            _ip("-n", self._namespace(host), "addr", "add", _address_beside(network, host), "dev", card)
            for end in (card, f"{card}o"):
                _ip("-n", self._namespace(host), "link", "set", end, "up")
            while "state UP" not in _ip("-n", self._namespace(host), "link", "show", card):
                time.sleep(0.01)

    def take_beside_away(self) -> None:
        for host in HOSTS:
            _ip("-n", self._namespace(host), "link", "del", self.beside(host))

    def readdress_beside(self, old: int, new: int) -> None:
        """The devices stay, with addresses of another network."""
        for host in HOSTS:
            _ip("-n", self._namespace(host), "addr", "del", _address_beside(old, host), "dev", self.beside(host))
            _ip("-n", self._namespace(host), "addr", "add", _address_beside(new, host), "dev", self.beside(host))

    def beside(self, host: str) -> str:
        """The name of that device."""
        return f"b{self._key}x{host[:1]}"

    def silence(self, host: str) -> None:
        """Not even a loopback interface."""
        _ip("-n", self._namespace(host), "link", "set", "lo", "down")

    def _namespace(self, host: str) -> str:
        return f"bkv{self._key}-{host}"


def _address_beside(network: int, host: str) -> str:
    return f"10.{network}.{HOSTS.index(host) + 1}.1/24"


def _ip(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer is for us, not for `ip`
    done = subprocess.run(["ip", *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
