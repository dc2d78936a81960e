"""Client, gateway, prefill and decode each in a network namespace of their own, with one wire for each pair that talks, which can be cut.

A wire is a pair of virtual network cards. It is cut by giving each end a hardware address for the other that nobody has: frames leave and nobody
takes them, so that no socket is closed, no error is reported and nothing is answered, as with a pulled cable behind a switch. Needs root and
`ip` (Debian: iproute2). A second wire from this process to each server, which is never cut, is for looking.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from itertools import pairwise
from typing import Self

PARTIES = ("client", "gateway", "prefill", "decode")
WIRES = ("client-gateway", "gateway-prefill", "gateway-decode", "prefill-decode")
_NOBODY = "02:00:00:00:00:01"


def why_not() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (Debian: iproute2)"
    if os.geteuid():
        return "network namespaces need root"
    name = f"bt{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def ip(*words: str) -> str:
    """What it prints. Fails with what `ip` says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


class Net:
    """Made on entry, gone on leaving. `address(party)`: what it is reached at, over whichever wire leads there from where one is."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(3)
        self._block = f"10.{100 + secrets.randbelow(100)}"
        self._cards: dict[str, tuple[tuple[str, str, str], tuple[str, str, str]]] = {}

    def __enter__(self) -> Self:
        try:
            for party in PARTIES:
                ip("netns", "add", self.namespace(party))
                ip("-n", self.namespace(party), "link", "set", "lo", "up")
                ip("-n", self.namespace(party), "addr", "add", f"{self.address(party)}/32", "dev", "lo")
            for number, wire in enumerate(WIRES):
                self._lay(wire, number)
            for number, party in enumerate(PARTIES[1:]):
                self._lay(f"-{party}", 100 + number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Cards go with their namespace."""
        for party in PARTIES:
            subprocess.run(["ip", "netns", "del", self.namespace(party)], capture_output=True, check=False)

    def namespace(self, party: str) -> str:
        return f"bt{self._key}-{party}"

    def address(self, party: str) -> str:
        return f"{self._block}.200.{PARTIES.index(party) + 1}"

    def command(self, party: str, *command: str) -> tuple[str, ...]:
        """Runs `command` as that party; the process keeps its number."""
        return ("ip", "netns", "exec", self.namespace(party), *command)

    def card(self, wire: str, party: str) -> str:
        """Name of the party's network card on a wire."""
        return f"b{self._key}{wire.replace('client', 'c').replace('gateway', 'g').replace('prefill', 'p').replace('decode', 'd')}{party[:1]}"

    def cut(self, wire: str) -> None:
        for (namespace, card, _), (_, _, other) in (self._cards[wire], self._cards[wire][::-1]):
            ip("-n", namespace, "neigh", "replace", other, "lladdr", _NOBODY, "dev", card, "nud", "permanent")

    def heal(self, wire: str) -> None:
        for (namespace, card, _), (_, _, other) in (self._cards[wire], self._cards[wire][::-1]):
            ip("-n", namespace, "neigh", "del", other, "dev", card)

    def take_away(self, wire: str) -> None:
        """The wire and both its cards, as if they had been pulled out: their addresses and routes go too."""
        namespace, card, _ = self._cards[wire][0]
        ip("-n", namespace, "link", "del", card)

    def lay_again(self, wire: str) -> None:
        """With new cards of the same names and addresses, which run when this returns."""
        self._lay(wire, WIRES.index(wire))
        for namespace, card, _ in self._cards[wire]:
            while "state UP" not in ip("-n", namespace, "link", "show", card):
                time.sleep(0.01)

    def lay_spare(self, party: str) -> None:
        """A device of one party, `spare(party)`, that leads nowhere."""
        card, number = self.spare(party), PARTIES.index(party)
        ip("-n", self.namespace(party), "link", "add", "name", card, "type", "veth", "peer", "name", f"{card}o")
        ip("-n", self.namespace(party), "addr", "add", f"{self._block}.{210 + number}.1/30", "dev", card)
        for end in (card, f"{card}o"):
            ip("-n", self.namespace(party), "link", "set", end, "up")
        while "state UP" not in ip("-n", self.namespace(party), "link", "show", card):
            time.sleep(0.01)

    def take_spare(self, party: str) -> None:
        ip("-n", self.namespace(party), "link", "del", self.spare(party))

    def readdress_spare(self, party: str, old: int = 210, new: int = 220) -> None:
        """The device stays, its address is of another network."""
        number = PARTIES.index(party)
        for word, network in (("del", old), ("add", new)):
            ip("-n", self.namespace(party), "addr", word, f"{self._block}.{network + number}.1/30", "dev", self.spare(party))

    def spare(self, party: str) -> str:
        return f"b{self._key}s{party[:1]}"

    def _make_cards(self, wire: str, ends: list[str]) -> list[str]:
        """Two cards, each in its party's namespace, that reach one another; a kind of wire of its own overrides this."""
        cards = [self.card(wire, party or "root") for party in ends]
        ip("link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
        for party, card in zip(ends, cards, strict=True):
            if party:
                ip("link", "set", card, "netns", self.namespace(party))
        return cards

    def _lay(self, wire: str, number: int) -> None:
        """A wire between two parties, or ("-party") between this process's own namespace and a party."""
        ends = wire.split("-")
        addresses = [f"{self._block}.{number}.{host}" for host in (1, 2)]
        laid = []
        for party, card, address in zip(ends, self._make_cards(wire, ends), addresses, strict=True):
            where = ["-n", self.namespace(party)] if party else []
            ip(*where, "addr", "add", f"{address}/30", "dev", card)
            ip(*where, "link", "set", card, "up")
            laid.append((self.namespace(party) if party else "", card, address))
        self._cards[wire] = (laid[0], laid[1])
        for (party, _), (near, far) in zip(pairwise([*ends, ends[0]]), (laid, laid[::-1]), strict=True):
            other = ends[1 - ends.index(party)]
            if other:
                where = ["-n", near[0]] if near[0] else []
                ip(*where, "route", "add", f"{self.address(other)}/32", "via", far[2], "dev", near[1])
