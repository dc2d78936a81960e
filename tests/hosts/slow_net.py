"""Hosts whose wire between prefill and decode is long (relay.py) and narrow (`tc`'s token bucket)."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from faults.net import Net, ip

HERE = Path(__file__).parent
#: Of a full frame of 1514 bytes, what TCP with timestamps over IPv4 carries.
PAYLOAD_SHARE = 1448 / 1514


def why_no_relay() -> str:
    """Why there can be no relay here; empty when there can."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    return ""


class SlowNet(Net):
    """Net whose wire between prefill and decode is `delay_ms` long each way and lets `megabits` a second through each way."""

    def __init__(self, megabits: int, delay_ms: float) -> None:
        super().__init__()
        self.megabits = megabits
        self.delay_ms = delay_ms
        self._relay: subprocess.Popen[str] | None = None

    def __exit__(self, *_: object) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            assert self._relay.stdout is not None
            self._relay.stdout.close()
        super().__exit__()

    @property
    def allowed_bytes_s(self) -> float:
        """What of TCP's payload the limit leaves."""
        return self.megabits * 1e6 / 8 * PAYLOAD_SHARE

    def plain_tcp_bytes_s(self, num_bytes: int) -> float:
        """Measured over the same wire between the same namespaces, by two processes that do nothing else."""
        port = str(20_000 + secrets.randbelow(10_000))
        script = (sys.executable, str(HERE / "plain_tcp.py"))
        receiver = subprocess.Popen(self.command("decode", *script, "receive", self.address("decode"), port), stdout=subprocess.PIPE, text=True)
        try:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n", "the receiver of plain TCP did not start"
            sent = subprocess.run(
                self.command("prefill", *script, "send", self.address("decode"), port, str(num_bytes)),
                capture_output=True, text=True, check=True, timeout=120,
            )  # fmt: skip
            receiver.wait(30)
        finally:
            receiver.kill()
            receiver.communicate()
        return num_bytes / float(sent.stdout)

    def _make_cards(self, wire: str, ends: list[str]) -> list[str]:
        if wire != "prefill-decode":
            return super()._make_cards(wire, ends)
        words = [word for party in ends for word in (self.namespace(party), self.card(wire, party))]
        command = (sys.executable, str(HERE / "relay.py"), *words, str(self.delay_ms))
        self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == "ready\n", "the relay of frames did not start"
        for party in ends:
            card = self.card(wire, party)
            limit = ("tbf", "rate", f"{self.megabits}mbit", "burst", "32kb", "latency", "300ms")
            ip("netns", "exec", self.namespace(party), "tc", "qdisc", "add", "dev", card, "root", *limit)
        return [self.card(wire, party) for party in ends]
