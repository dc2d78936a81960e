"""KV pages between two processes, device memory to device memory, on one or two GPUs: checked first, then timed beside ucx_perftest.

    python benchmarks/gpu/transfer.py [--sender-device 0] [--receiver-device 0] [--queues 4] [--rounds 7]

The load is the KV cache of an 8,192-token prompt of the Qwen3-8B geometry (36 layers, 8 KV heads of 128, bf16: 1.2 GB) as long runs and as pages at
random places in both pools. Times are from the first `post` until the doorbell is flushed (what prefill waits for).
Needs a GPU, torch and a libucx wheel.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import torch

from baton.kvtransfer import AgentConfig, Doorbell, WriteHandle, open_agent
from baton.kvtransfer.bench.perftest import program

POOL_BYTES = 72 * (16 << 20) * 2  # twice what is moved, so that random places are random
CASES = (
    ("72 runs of 16 MiB", 72, 16 << 20),
    ("1,152 runs of 1 MiB", 1152, 1 << 20),
    ("9,216 pages of 128 KiB", 9216, 128 << 10),
    ("8,192 pages of 16 KiB", 8192, 16 << 10),
)
SEED = 20


def places(count: int, num_bytes: int, case: int) -> np.ndarray:
    """int64 [count, 3]: random, disjoint places in both pools; the same in both processes."""
    generator = np.random.default_rng(SEED + case)
    slots = POOL_BYTES // num_bytes
    rows = np.empty((count, 3), dtype=np.int64)
    rows[:, 0] = generator.permutation(slots)[:count] * num_bytes
    rows[:, 1] = generator.permutation(slots)[:count] * num_bytes
    rows[:, 2] = num_bytes
    return rows


def source_bytes(device: int) -> torch.Tensor:
    generator = torch.Generator(device=f"cuda:{device}").manual_seed(SEED)
    return torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, device=f"cuda:{device}", generator=generator)


def receive(pipe: Connection, device: int) -> None:
    torch.cuda.set_device(device)
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    expected_source = source_bytes(device)
    torch.cuda.synchronize()
    with open_agent(AgentConfig(instance_id="gpu-receiver", transport="auto", device=str(device), probe_bytes=64 << 20)) as agent:
        region = agent.register(pool.data_ptr(), POOL_BYTES)
        inbox = agent.open_inbox("gpu-sender", region, 4)
        pipe.send(inbox.invitation)
        slot: int | None = None
        while (message := pipe.recv()) is not None:
            kind, number = message
            if kind == "arm":
                if slot is not None:
                    inbox.disarm(slot)
                slot = inbox.arm(number, 1)
                pipe.send(slot)
            elif kind == "poison":
                pool.fill_(0xAB)
                torch.cuda.synchronize()
                pipe.send(True)
            else:
                pipe.send(landed_as_expected(pool, expected_source, number))


def landed_as_expected(pool: torch.Tensor, source: torch.Tensor, case: int) -> bool:
    """Every byte: the moved ones are the source's, all others are still poison."""
    _, count, num_bytes = CASES[case]
    rows = torch.from_numpy(places(count, num_bytes, case) // num_bytes).to(pool.device)
    expected = torch.full_like(pool, 0xAB).view(-1, num_bytes)
    expected[rows[:, 1]] = source.view(-1, num_bytes)[rows[:, 0]]
    return bool(torch.equal(expected.view(-1), pool))


class Sender:
    def __init__(self, pipe: Connection, device: int, queues: int) -> None:
        torch.cuda.set_device(device)
        self.pipe = pipe
        self.pool = source_bytes(device)
        torch.cuda.synchronize()
        self.agent = open_agent(
            AgentConfig(instance_id="gpu-sender", transport="auto", device=str(device), transfer_queues=queues, probe_bytes=64 << 20)
        )
        region = self.agent.register(self.pool.data_ptr(), POOL_BYTES)
        self.peer = self.agent.connect(pipe.recv(), region)
        self.ended = threading.Event()
        self.agent.on_write(self._on_write)
        self.room = 0

    def _on_write(self, _: WriteHandle) -> None:
        self.ended.set()

    def ask(self, kind: str, number: int = 0) -> object:
        self.pipe.send((kind, number))
        return self.pipe.recv()

    def move(self, rows: np.ndarray) -> float:
        """Seconds from `post` until the doorbell is flushed."""
        self.room += 1
        slot = self.ask("arm", self.room)
        assert isinstance(slot, int)
        handle = self.peer.begin(self.room)
        self.ended.clear()
        start = time.monotonic()
        handle.post(rows)
        handle.finish(slot, Doorbell(self.room, 1))
        assert self.ended.wait(60), "no end within 60 s"
        if handle.error:
            raise handle.error
        assert handle.done_time is not None
        return handle.done_time - start


def perftest(device_a: int, device_b: int, num_bytes: int, threads: int) -> float:
    """GB/s of ucx_perftest ucp_put_bw, CUDA memory in two processes."""
    executable = program()
    assert executable is not None, "the libucx wheel has no ucx_perftest"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(executable.parent.parent / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    count = max(20, min(4000, (4 << 30) // num_bytes))
    command = [str(executable), "-p", "23777", "-t", "ucp_put_bw", "-m", "cuda", "-s", str(num_bytes), "-n", str(count), "-w", "10", "-f"]
    command += ["-T", str(threads), "-M", "multi"] if threads > 1 else []
    server = subprocess.Popen(
        command, env={**environment, "CUDA_VISIBLE_DEVICES": str(device_b)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(2.0)
        client = subprocess.run(
            [*command, "-v", "127.0.0.1"],
            env={**environment, "CUDA_VISIBLE_DEVICES": str(device_a)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        server.kill()
        server.wait()
    try:
        return float(client.stdout.strip().splitlines()[-1].split(",")[5]) * (1 << 20) / 1e9
    except (IndexError, ValueError):
        print("ucx_perftest:", client.stdout[-300:], client.stderr[-300:])
        return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("--sender-device", 0), ("--receiver-device", 0), ("--queues", 4), ("--rounds", 7)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, options.receiver_device), daemon=True)
    process.start()
    sender = Sender(pipe, options.sender_device, options.queues)
    print(torch.cuda.get_device_name(options.sender_device), "->", torch.cuda.get_device_name(options.receiver_device))
    print(sender.agent.description, "| transport", sender.peer.transport)
    for point in sender.peer.probe():
        print(f"probe {point.direction:5} {point.num_bytes:>11,} bytes {point.gigabytes_per_s:8.2f} GB/s")
    for number, (name, count, num_bytes) in enumerate(CASES):
        rows = places(count, num_bytes, number)
        sender.ask("poison")
        sender.move(rows)
        correct = sender.ask("check", number)
        times = [sender.move(rows) for _ in range(options.rounds)]
        peers = {threads: perftest(options.sender_device, options.receiver_device, num_bytes, threads) for threads in (1, 4)}
        median = statistics.median(times)
        ours = count * num_bytes / median / 1e9
        best = max(peers.values())
        print(
            f"{name:24} bytes equal: {correct}  ours {median * 1e3:8.2f} ms (min {min(times) * 1e3:.2f}) {ours:7.1f} GB/s | ucx_perftest "
            + ", ".join(f"{rate:.1f} GB/s with {threads} thread{'s' * (threads > 1)}" for threads, rate in peers.items())
            + f" | ratio to its best {ours / best:.2f}",
            flush=True,
        )
        assert correct, f"{name}: bytes differ"
    pipe.send(None)
    sender.agent.close()
    process.join(10)


if __name__ == "__main__":
    main()
