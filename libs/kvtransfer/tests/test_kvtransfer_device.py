"""The path for device memory without a GPU: a stand-in for the driver (cuda_stand_in.c) behind the real core.

What it cannot show, the kernel itself above all, `python -m baton.kvtransfer.bench.gpu` checks on a GPU before it measures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("cuda_stand_in.c")
PREAMBLE = """
import ctypes, threading, time
import numpy as np
import baton.kvtransfer as kv
from baton.kvtransfer import AgentConfig, Doorbell, WriteState, open_agent

PAGE, NUM_PAGES = 16 << 10, 2048
agents = [open_agent(AgentConfig(name, transport="shm", device="0", probe_bytes=1 << 20)) for name in ("sender", "receiver")]
sender, receiver = agents
ended = threading.Event()
sender.on_write(lambda handle: ended.set())
source = np.random.default_rng(1).integers(0, 256, NUM_PAGES * PAGE, dtype=np.uint8)
pool = np.full(NUM_PAGES * PAGE, 0xA5, dtype=np.uint8)
from_region = sender.register(source.ctypes.data, source.nbytes)
inbox = receiver.open_inbox("sender", receiver.register(pool.ctypes.data, pool.nbytes))
peer = sender.connect(inbox.invitation, from_region)
order = np.random.default_rng(2).permutation(NUM_PAGES)
rows = np.stack([np.arange(NUM_PAGES) * PAGE, order * PAGE, np.full(NUM_PAGES, PAGE)], axis=1)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("driver")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(folder / "libcuda.so.1"), str(SOURCE)]
    subprocess.run(command, env=environment, check=True)
    return str(folder)


def run(driver: str, code: str) -> str:
    environment = {**os.environ, "LD_LIBRARY_PATH": driver}
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scattered_pages_go_in_a_launch(driver: str) -> None:
    said = run(
        driver,
        """
        assert peer.transport == "cuda_ipc_kernel", peer.transport
        slot = inbox.arm(1, 1)
        handle = peer.begin(1)
        for part in np.array_split(rows, 3):
            handle.post(part)
        handle.finish(slot, Doorbell(1, 1))
        assert ended.wait(20) and handle.state is WriteState.DONE, handle.error
        assert (pool.reshape(NUM_PAGES, PAGE)[order] == source.reshape(NUM_PAGES, PAGE)).all()
        assert [bell.room for bell in inbox.poll()] == [1]
        assert handle.num_bytes == source.nbytes
        print(handle.num_puts <= 3)
        points = peer.probe()
        assert {point.num_bytes for point in points} == {64 << 10, 1 << 20} and all(point.gigabytes_per_s > 0 for point in points)
        """,
    )
    assert said == "True\n"


def test_many_launches_reuse_their_slots_in_order(driver: str) -> None:
    run(
        driver,
        """
        handles = []
        for room in range(1, 40):
            handle = peer.begin(room)
            handle.post(np.array([[0, room * PAGE + 3, 5 * PAGE + 1]]))   # unaligned, and cut into tiles
            handle.finish(inbox.arm(room, 1), Doorbell(room, 1))
            handles.append(handle)
        deadline = time.monotonic() + 20
        while any(handle.state is WriteState.OPEN for handle in handles) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert {handle.state for handle in handles} == {WriteState.DONE}
        assert sorted(bell.room for bell in inbox.poll()) == list(range(1, 40))
        want = np.full(NUM_PAGES * PAGE, 0xA5, dtype=np.uint8)
        for room in range(1, 40):
            want[room * PAGE + 3 : room * PAGE + 3 + 5 * PAGE + 1] = source[: 5 * PAGE + 1]
        assert (pool == want).all()
        """,
    )


def test_nothing_is_read_before_the_event_has_fired(driver: str) -> None:
    run(
        driver,
        """
        class Event(ctypes.Structure):
            _fields_ = [("fired", ctypes.c_int32), ("asked", ctypes.c_int32), ("pending", ctypes.c_uint64 * 4)]

        event = Event()
        slot = inbox.arm(1, 1)
        handle = peer.begin(1)
        handle.post(rows[:1])
        handle.post(rows[1:2], ready=ctypes.addressof(event))
        handle.post(rows[2:3])
        handle.finish(slot, Doorbell(1, 1))
        time.sleep(0.1)
        assert handle.state is WriteState.OPEN and handle.num_bytes == PAGE
        source[PAGE : 2 * PAGE] = 7  # the layer is computed only now
        event.fired = 1
        assert ended.wait(20) and handle.state is WriteState.DONE
        assert (pool.reshape(NUM_PAGES, PAGE)[order[1]] == 7).all()

        never, ended_before = Event(), ended.clear()
        handle = peer.begin(2)
        handle.post(rows[5:6], ready=ctypes.addressof(never))
        handle.cancel()
        assert ended.wait(20) and handle.state is WriteState.QUIESCED and handle.num_bytes == 0
        """,
    )


def test_layers_posted_while_an_earlier_one_is_awaited(driver: str) -> None:
    """Each post makes the queue look at the write again: it must wait for the event once, not once a look."""
    run(
        driver,
        """
        class Event(ctypes.Structure):
            _fields_ = [("fired", ctypes.c_int32), ("asked", ctypes.c_int32), ("pending", ctypes.c_uint64 * 4)]

        events = [Event() for _ in range(12)]
        slot = inbox.arm(1, 1)
        handle = peer.begin(1)
        for layer, event in enumerate(events):
            handle.post(rows[layer : layer + 1], ready=ctypes.addressof(event))
            time.sleep(0.005)
        handle.finish(slot, Doorbell(1, 1))
        for event in events:
            assert handle.state is WriteState.OPEN, handle.error
            event.fired = 1
            time.sleep(0.002)
        assert ended.wait(20) and handle.state is WriteState.DONE, handle.error
        assert handle.num_bytes == len(events) * PAGE
        assert (pool.reshape(NUM_PAGES, PAGE)[order[: len(events)]] == source.reshape(NUM_PAGES, PAGE)[: len(events)]).all()
        """,
    )


def test_a_device_without_a_driver_is_an_error_that_names_it() -> None:
    done = subprocess.run([sys.executable, "-c", PREAMBLE], capture_output=True, text=True, timeout=60, check=False)
    assert "UCXError: dlopen(libcuda.so.1) failed" in done.stderr


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90"])
def test_the_kernel_assembles(tmp_path: Path, architecture: str) -> None:
    """By the assembler that triton brings; the driver does the same when it loads the kernel."""
    spec = find_spec("triton")
    assembler = Path(spec.origin).parent / "backends/nvidia/bin/ptxas" if spec and spec.origin else None
    if assembler is None or not assembler.is_file():
        pytest.skip("no ptxas here: triton is not installed")
    header = (SOURCE.parents[1] / "src/baton/kvtransfer/native/scatter_ptx.hpp").read_text(encoding="utf-8")
    kernel = tmp_path / "scatter.ptx"
    kernel.write_text(header.split('R"ptx(\n')[1].split(')ptx"')[0], encoding="ascii")
    done = subprocess.run(
        [assembler, f"-arch={architecture}", "-v", kernel, "-o", tmp_path / "scatter.cubin"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr
