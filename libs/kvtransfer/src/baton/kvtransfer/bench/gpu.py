"""python -m baton.kvtransfer.bench.gpu: device memory between two processes, ours beside NIXL and ucx_perftest, checked before it is measured.

The prompt of 8,192 tokens of the Qwen3-8B geometry (36 layers, 8 KV heads of 128, bf16: 1.2 GB) as long runs and as scattered pages.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Any, Self

import numpy as np

from baton.kvtransfer import AgentConfig, Doorbell, open_agent
from baton.kvtransfer.bench import nixl, perftest
from baton.kvtransfer.bench.cases import KIB, MIB, Case
from baton.kvtransfer.bench.cuda_memory import CudaMemory

POOL_BYTES = 3 << 30


@dataclass(frozen=True)
class Layout:
    """`count` spans of `num_bytes`: one after the other, or at random places of both pools."""

    name: str
    num_bytes: int
    count: int
    scattered: bool

    def rows(self) -> np.ndarray:
        if not self.scattered:
            offsets = np.arange(self.count) * self.num_bytes
            # a hole between any two, so that they stay as many runs as they are said to be
            return np.stack([offsets, offsets + np.arange(self.count) * 4096, np.full(self.count, self.num_bytes)], axis=1)
        random = np.random.default_rng(5)
        places = [random.permutation(POOL_BYTES // self.num_bytes)[: self.count] * self.num_bytes for _ in range(2)]
        return np.stack([*places, np.full(self.count, self.num_bytes)], axis=1)


LAYOUTS = (
    Layout("72 runs of 16 MiB", 16 * MIB, 72, False),
    Layout("9,216 pages of 128 KiB", 128 * KIB, 9216, True),
    Layout("1,152 pages of 1 MiB", MIB, 1152, True),
    Layout("8,192 pages of 16 KiB", 16 * KIB, 8192, True),
)


def _pattern() -> np.ndarray:
    """The sender's pool: random, with a period that no page size divides."""
    period = np.random.default_rng(9).integers(0, 256, 64 * MIB + 4099, dtype=np.uint8)
    return np.resize(period, POOL_BYTES)


def _wrong_bytes(got: np.ndarray, rows: np.ndarray) -> int:
    """How many bytes of the receiver's pool are not what `rows` should have made of zeros."""
    want, source = np.zeros(POOL_BYTES, dtype=np.uint8), _pattern()
    for from_, to, length in rows.tolist():
        want[to : to + length] = source[from_ : from_ + length]
    return int((want != got).sum())


def _receive(pipe: Connection, device: int) -> None:
    memory = CudaMemory(device, POOL_BYTES)
    with open_agent(AgentConfig(instance_id="receiver", transport="shm", device=str(device))) as agent:
        inbox = agent.open_inbox("sender", agent.register(memory.address, POOL_BYTES), 4)
        pipe.send(inbox.invitation)
        slot: int | None = None
        while (task := pipe.recv()) is not None:
            word, argument = task
            if word == "clear":
                memory.write(np.zeros(POOL_BYTES, dtype=np.uint8))
                pipe.send(None)
            elif word == "check":
                pipe.send(_wrong_bytes(memory.read(), argument))
            else:
                if slot is not None:
                    inbox.disarm(slot)
                slot = inbox.arm(argument, 1)
                pipe.send(slot)


class Ours:
    def __init__(self, sender_device: int, receiver_device: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, receiver_device), daemon=True)
        self._process.start()
        self._memory = CudaMemory(sender_device, POOL_BYTES)
        self._memory.write(_pattern())
        self._agent = open_agent(AgentConfig(instance_id="sender", transport="shm", device=str(sender_device)))
        self._peer = self._agent.connect(self._pipe.recv(), self._agent.register(self._memory.address, POOL_BYTES))
        self._ended = threading.Event()
        self._agent.on_write(lambda _: self._ended.set())
        self._room = 0

    def describe(self) -> str:
        points = ", ".join(f"{point.direction} {point.num_bytes >> 10} KiB {point.gigabytes_per_s:.1f} GB/s" for point in self._peer.probe())
        return f"{self._agent.description}; writes go over {self._peer.transport}; probe: {points}"

    def seconds(self, layout: Layout) -> float:
        self._room += 1
        slot = self._ask(("arm", self._room))
        rows = layout.rows()
        handle = self._peer.begin(self._room)
        self._ended.clear()
        start = time.monotonic()
        handle.post(rows)
        handle.finish(slot, Doorbell(self._room, 1))
        self._ended.wait()
        if handle.error:
            raise handle.error
        assert handle.done_time is not None  # it is final
        return handle.done_time - start

    def wrong_bytes(self, layout: Layout) -> int:
        self._ask(("clear", None))
        self.seconds(layout)
        return int(self._ask(("check", layout.rows())))

    def _ask(self, task: tuple[str, Any]) -> Any:
        self._pipe.send(task)
        return self._pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._agent.close()
        self._pipe.send(None)
        self._process.join(20)


def _nixl_agent(name: str, device: int, num_threads: int) -> tuple[Any, CudaMemory]:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    memory = CudaMemory(device, POOL_BYTES)
    api = importlib.import_module(f"{nixl.module_name()}._api")
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], num_threads=num_threads))
    agent.register_memory(agent.get_reg_descs([(memory.address, POOL_BYTES, device, "")], "VRAM"))
    return agent, memory


def _nixl_target(pipe: Connection, device: int, num_threads: int) -> None:
    agent, memory = _nixl_agent("target", device, num_threads)
    pipe.send((agent.get_agent_metadata(), memory.address, device))
    pipe.recv()


def _nixl_initiator(pipe: Connection, device: int, num_threads: int) -> None:
    agent, memory = _nixl_agent("initiator", device, num_threads)
    metadata, remote, remote_device = pipe.recv()
    name = agent.add_remote_agent(metadata)
    name = name.decode() if isinstance(name, bytes) else name
    pipe.send("ready")
    while (layout := pipe.recv()) is not None:
        rows = layout.rows().tolist()
        here = agent.get_xfer_descs([(memory.address + from_, length, device) for from_, _, length in rows], "VRAM")
        there = agent.get_xfer_descs([(remote + to, length, remote_device) for _, to, length in rows], "VRAM")
        handle = agent.initialize_xfer("WRITE", here, there, name)
        start = time.monotonic()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        elapsed = time.monotonic() - start
        agent.release_xfer_handle(handle)
        pipe.send(elapsed if state == "DONE" else float("inf"))


class Nixl:
    def __init__(self, sender_device: int, receiver_device: int, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for role, device in ((_nixl_target, receiver_device), (_nixl_initiator, sender_device)):
            pipe, theirs = context.Pipe()
            process = context.Process(target=role, args=(theirs, device, num_threads), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        self._pipes[1].send(self._pipes[0].recv())
        self._pipes[1].recv()

    def seconds(self, layout: Layout) -> float:
        self._pipes[1].send(layout)
        return float(self._pipes[1].recv())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(20)
            process.kill()


def _times(runner: Ours | Nixl, layout: Layout, repeats: int) -> float:
    runner.seconds(layout)  # warm
    return median(runner.seconds(layout) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baton.kvtransfer.bench.gpu", description=__doc__)
    parser.add_argument("--sender-device", type=int, default=0)
    parser.add_argument("--receiver-device", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--nixl-threads", type=int, nargs="*", default=[0, 4, 8])
    arguments = parser.parse_args()
    devices = arguments.sender_device, arguments.receiver_device
    with Ours(*devices) as ours:
        print(ours.describe(), flush=True)
        for layout in LAYOUTS:
            wrong = ours.wrong_bytes(layout)
            print(f"check {layout.name}: {'right' if wrong == 0 else f'{wrong} WRONG BYTES'}", flush=True)
            if wrong:
                raise SystemExit(1)
        mine = {layout: _times(ours, layout, arguments.repeats) for layout in LAYOUTS}
    theirs: dict[Layout, dict[int, float]] = {layout: {} for layout in LAYOUTS}
    if nixl.module_name():
        for threads in arguments.nixl_threads:
            with ExitStack() as stack:
                runner = stack.enter_context(Nixl(*devices, threads))
                for layout in LAYOUTS:
                    theirs[layout][threads] = _times(runner, layout, arguments.repeats)
    executable = perftest.program()
    for layout in LAYOUTS:
        gigabytes = layout.num_bytes * layout.count / 1e9
        best = min(theirs[layout].values(), default=None)
        shown = ", ".join(f"{threads} threads {seconds * 1e3:.2f} ms" for threads, seconds in theirs[layout].items()) or "not there"
        line = f"{layout.name}: ours {mine[layout] * 1e3:.3f} ms ({gigabytes / mine[layout]:.0f} GB/s), NIXL {shown}"
        if best:
            line += f", {best / mine[layout]:.1f}x as fast as its best"
        if executable:
            case = Case("shm", layout.num_bytes, max(200, min(4000, layout.count)))
            line += f"; ucx_perftest {perftest.gigabytes_per_s_between_devices(executable, case):.0f} GB/s"
        print(line, flush=True)


if __name__ == "__main__":
    main()
