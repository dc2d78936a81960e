"""A long wire: a process of ours between two TAP cards that holds each frame for a while, since kernels of small test machines have no netem.

    python relay.py NAMESPACE CARD NAMESPACE CARD DELAY_MS

prints "ready" when both cards are there, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_FRAME_BYTES = 2048


class Delay:
    """One direction: frames read from one card leave on the other when their time has come."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source = source
        self._target = target
        self._delay_s = delay_s
        self._held: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._held.append((time.monotonic() + self._delay_s, os.read(self.source, _FRAME_BYTES)))

    def give(self) -> float | None:
        """Seconds until the next one is due."""
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            with contextlib.suppress(BlockingIOError, OSError):  # a full or closed card drops frames, as cards do
                os.write(self._target, self._held[0][1])
            self._held.popleft()
        return self._held[0][0] - now if self._held else None


def relay(ends: list[tuple[str, str]], delay_s: float) -> None:
    """Until it is killed."""
    cards = [_open_tap(namespace, card) for namespace, card in ends]
    ways = [Delay(cards[0], cards[1], delay_s), Delay(cards[1], cards[0], delay_s)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    wait_s: float | None = None
    while True:
        readable, _, _ = select.select(cards, [], [], wait_s)
        for way in ways:
            if way.source in readable:
                way.take()
        dues = [due for way in ways if (due := way.give()) is not None]
        wait_s = min(dues, default=None)


def _open_tap(namespace: str, card: str) -> int:
    """A card that lives as long as the descriptor. It belongs to the namespace in which the device file was opened."""
    descriptor = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be entered")
    finally:
        os.close(descriptor)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", card.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    relay([(sys.argv[1], sys.argv[2]), (sys.argv[3], sys.argv[4])], float(sys.argv[5]) / 1e3)
