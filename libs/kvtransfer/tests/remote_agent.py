"""The other process of a test: an agent whose methods are called over a pipe. Run as `python remote_agent.py FD`."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from baton.kvtransfer import AgentConfig, Doorbell, WriteHandle, WriteState, _native, digest, open_agent
from baton.kvtransfer.ucx import devices


class RemoteAgent:
    """One agent with one region; receives into it and sends out of it. Everything it takes and returns can be pickled."""

    def __init__(self, num_bytes: int, fill: int = 0, **config: Any) -> None:
        self.agent = open_agent(AgentConfig(**config))
        self.region = self.agent.allocate(num_bytes)
        if fill:
            np.frombuffer(self.region.buffer, dtype=np.uint8)[:] = fill
        self.inboxes: list[Any] = []
        self.peers: list[Any] = []
        self.handles: dict[int, WriteHandle] = {}
        self.rung: list[Doorbell] = []
        self.final: list[tuple[int, str]] = []
        self.lost: list[str] = []
        self.changed = threading.Condition()
        self.agent.on_doorbell(self._on_doorbell)
        self.agent.on_write(self._on_write)
        self.agent.on_peer_lost(self._on_lost)

    def _on_doorbell(self, inbox: Any) -> None:
        with self.changed:
            self.rung += inbox.poll()
            self.changed.notify_all()

    def _on_write(self, handle: WriteHandle) -> None:
        with self.changed:
            self.final.append((handle.room, handle.state.value))
            self.changed.notify_all()

    def _on_lost(self, peer: Any) -> None:
        with self.changed:
            self.lost.append(peer.instance_id)
            self.changed.notify_all()

    def pid(self) -> int:
        return os.getpid()

    def overlook_devices(self) -> None:
        """From now on this process does not see that devices come and go, as if each did so right after it looked."""
        found = devices.find()
        devices.find = lambda *_: found  # type: ignore[assignment]

    def num_contexts(self) -> int:
        return _native.num_contexts()

    def belongings(self) -> tuple[int, int]:
        """Descriptors and threads of this process."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def cpu_s(self) -> float:
        return time.process_time()

    def identity(self) -> bytes:
        return self.agent.identity

    def write(self, offset: int, data: bytes) -> None:
        self.region.buffer[offset : offset + len(data)] = data

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self.region.buffer[offset : offset + num_bytes])

    def digest(self, runs: list[tuple[int, int]]) -> int:
        return digest(self.region, runs)

    def open_inbox(self, sender_id: str = "sender", num_doorbells: int = 1024) -> tuple[int, bytes]:
        self.inboxes.append(self.agent.open_inbox(sender_id, self.region, num_doorbells))
        return len(self.inboxes) - 1, self.inboxes[-1].invitation

    def arm(self, inbox: int, room: int, generation: int) -> int:
        return self.inboxes[inbox].arm(room, generation)

    def disarm(self, inbox: int, slot: int) -> None:
        self.inboxes[inbox].disarm(slot)

    def fence(self, inbox: int, identity: bytes | None = None) -> bool:
        return self.inboxes[inbox].fence(identity)

    def close_inbox(self, inbox: int) -> None:
        self.inboxes[inbox].close()

    def stats(self, inbox: int) -> Any:
        return self.inboxes[inbox].stats

    def doorbells(self, count: int, timeout_s: float = 10.0) -> list[Doorbell]:
        """All that rang so far, once there are `count` or the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.rung) >= count, timeout_s)
            return list(self.rung)

    def connect(self, invitation: bytes) -> int:
        self.peers.append(self.agent.connect(invitation, self.region))
        return len(self.peers) - 1

    def close_peer(self, peer: int) -> None:
        self.peers[peer].close()

    def check_peer(self, peer: int) -> bool:
        return self.peers[peer].check()

    def missing(self, inbox: int) -> str:
        return self.inboxes[inbox].missing

    def lost_peers(self) -> list[str]:
        with self.changed:
            return list(self.lost)

    def begin(self, peer: int, room: int) -> None:
        self.handles[room] = self.peers[peer].begin(room)

    def post(self, room: int, spans: list[tuple[int, int, int]]) -> None:
        self.handles[room].post(np.array(spans, dtype=np.int64).reshape(-1, 3))

    def finish(self, room: int, slot: int, doorbell: Doorbell) -> None:
        self.handles[room].finish(slot, doorbell)

    def cancel(self, room: int) -> None:
        self.handles[room].cancel()

    def flood(self, peer: int, room: int, span_bytes: int, count: int) -> None:
        """Writes the same `span_bytes` at offset 0 again and again."""
        self.begin(peer, room)
        rows = np.zeros((count, 3), dtype=np.int64)
        rows[:, 2] = span_bytes
        self.handles[room].post(rows)

    def state(self, room: int, timeout_s: float = 10.0) -> WriteState:
        """What was reported of the room's handle; OPEN when the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: any(known == room for known, _ in self.final), timeout_s)
            return WriteState(next((state for known, state in self.final if known == room), "open"))

    def num_bytes(self, room: int) -> int:
        return self.handles[room].num_bytes

    def close(self) -> None:
        self.agent.close()


def serve(pipe: Connection) -> None:
    target: RemoteAgent | None = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            if target is not None:
                target.close()
            return
        try:
            if name == "open":
                target, result = RemoteAgent(**arguments), None
            else:
                result = getattr(target, name)(*arguments)
        except Exception as error:
            pipe.send((False, (type(error).__name__, f"{error}\n{traceback.format_exc()}")))
        else:
            pipe.send((True, result))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
