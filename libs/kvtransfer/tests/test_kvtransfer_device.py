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

driver = ctypes.CDLL("libcuda.so.1")
HOLD, FAIL_RECORD, FAIL_LAUNCH, LAUNCHES, COPIES = (
    ctypes.c_int.in_dll(driver, f"stand_in_{name}") for name in ("hold", "fail_record", "fail_launch", "launches", "copies")
)

class Event(ctypes.Structure):
    _fields_ = [("fired", ctypes.c_int32), ("asked", ctypes.c_int32), ("pending", ctypes.c_uint64 * (4 + 64 * 3 + 1))]

def wait_for(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)

def start(room, page, event=None):  # a room of one page, finished
    handle = peer.begin(room)
    handle.post(rows[page : page + 1], ready=ctypes.addressof(event) if event else None)
    handle.finish(inbox.arm(room, 1), Doorbell(room, 1))
    return handle

def landed(page):
    return (pool.reshape(NUM_PAGES, PAGE)[order[page]] == source.reshape(NUM_PAGES, PAGE)[page]).all()
"""

# Their threads would run on while a sanitizer stops all of them to look for leaks.
CLOSING = """
for agent in agents:
    agent.close()
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
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code) + CLOSING], env=environment, capture_output=True, text=True, timeout=60, check=False
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


def test_whoever_asks_the_driver_has_bound_its_context_first(driver: str) -> None:
    """The queue's thread is not the one that made the agent: without a context of its own, calls fail, and UCX leaves CUDA out without a word."""
    run(
        driver,
        """
        bound, refused = (ctypes.c_int.in_dll(driver, f"stand_in_{name}") for name in ("bound_threads", "unbound_calls"))
        event = Event()
        assert driver.cuEventQuery(ctypes.byref(event)) in (201, 600)
        before = refused.value
        handle = start(1, 0, event)
        time.sleep(0.05)
        event.fired = 1
        assert ended.wait(20) and handle.state is WriteState.DONE, handle.error
        assert peer.probe() and landed(0)
        assert (bound.value >= 2, refused.value - before) == (True, 0), (bound.value, refused.value)
        """,
    )


def test_long_runs_are_copies_and_leave_the_multiprocessors_alone(driver: str) -> None:
    run(
        driver,
        """
        MIB = 1 << 20
        runs = np.array([[0, 16 * MIB, 3 * MIB], [4 * MIB, 8 * MIB, 2 * MIB], [7 * MIB, 2 * MIB, 2 * MIB - 1], [20 * MIB, 20 * MIB, 5 * PAGE]])
        before = LAUNCHES.value
        handle = peer.begin(1)
        handle.post(runs)
        handle.finish(inbox.arm(1, 1), Doorbell(1, 1))
        assert ended.wait(20) and handle.state is WriteState.DONE, handle.error
        want = np.full(NUM_PAGES * PAGE, 0xA5, dtype=np.uint8)
        for from_, to, length in runs.tolist():
            want[to : to + length] = source[from_ : from_ + length]
        assert (pool == want).all()
        assert (COPIES.value, LAUNCHES.value - before) == (2, 1)  # two are long; the kernel stores the others
        assert handle.num_bytes == runs[:, 2].sum() and handle.num_puts == 3

        HOLD.value = 1  # cancelled while copies are under way
        pool[:] = 0xA5
        handle = peer.begin(2)
        handle.post(np.stack([np.zeros(12), np.arange(12) * 2 * MIB + 4096 * np.arange(12), np.full(12, 2 * MIB)], axis=1).astype(np.int64))
        time.sleep(0.05)
        handle.cancel()
        time.sleep(0.05)
        assert handle.state is WriteState.OPEN
        HOLD.value = 0
        wait_for(lambda: handle.state is WriteState.QUIESCED)
        """,
    )


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


def test_a_probe_waits_for_room_among_the_launches(driver: str) -> None:
    """As many launches as there are slots are in flight when the probe comes: it must not take one of theirs."""
    run(
        driver,
        """
        HOLD.value = 1
        handles = [start(room, room) for room in range(1, 20)]
        time.sleep(0.1)
        assert not any(landed(room) for room in range(1, 20))
        points = []
        prober = threading.Thread(target=lambda: points.extend(peer.probe()))
        prober.start()
        time.sleep(0.1)
        HOLD.value = 0
        wait_for(lambda: all(handle.state is WriteState.DONE for handle in handles))
        prober.join(20)
        assert len(points) == 4
        assert all(landed(room) for room in range(1, 20))
        untouched = np.setdiff1d(np.arange(NUM_PAGES), order[1:20])
        assert (pool.reshape(NUM_PAGES, PAGE)[untouched] == 0xA5).all()
        """,
    )


@pytest.mark.parametrize(("fault", "function"), [("FAIL_RECORD", "cuEventRecord"), ("FAIL_LAUNCH", "cuLaunchKernel")])
def test_a_write_fails_only_when_no_kernel_reads_its_source_any_more(driver: str, fault: str, function: str) -> None:
    run(
        driver,
        f"""
        HOLD.value = 1
        before = start(1, 1)  # in flight when the next one goes wrong
        time.sleep(0.05)
        {fault}.value = 1
        handle = start(2, 2)
        wait_for(lambda: peer.is_lost)
        time.sleep(0.05)
        assert before.state is WriteState.OPEN and handle.state is WriteState.OPEN  # a kernel may still run
        HOLD.value = 0
        wait_for(lambda: before.state is not WriteState.OPEN and handle.state is not WriteState.OPEN)
        assert handle.state is WriteState.FAILED and "{function}" in str(handle.error), handle.error
        assert before.state is WriteState.FAILED and landed(1)
        assert landed(2) == ("{fault}" == "FAIL_RECORD")  # launched, though no event stands for it: it was waited for
        assert inbox.poll() == []
        peer.close()
        peer = sender.connect(inbox.invitation, from_region)
        again = start(3, 3)
        wait_for(lambda: again.state is WriteState.DONE)
        """,
    )


def test_an_event_that_cannot_be_asked_fails_its_own_write_only(driver: str) -> None:
    run(
        driver,
        """
        events = [Event() for _ in range(5)]
        handles = [start(1 + number, number, event) for number, event in enumerate(events)]
        time.sleep(0.05)
        events[1].fired = 2
        wait_for(lambda: handles[1].state is WriteState.FAILED)
        assert "cuEventQuery" in str(handles[1].error)
        assert not peer.is_lost
        for event in events[2:] + events[:1]:
            event.fired = 1
        wait_for(lambda: all(handle.state is WriteState.DONE for handle in handles[2:] + handles[:1]))
        assert not landed(1) and landed(0) and landed(4)
        """,
    )


def test_closing_while_an_event_is_awaited_quiesces(driver: str) -> None:
    run(
        driver,
        """
        never = Event()
        handle = start(1, 1, never)
        time.sleep(0.05)
        begun = time.monotonic()
        peer.close()
        assert time.monotonic() - begun < 1
        assert handle.state is WriteState.QUIESCED and handle.num_bytes == 0
        asked = never.asked
        assert inbox.fence(None) is True
        """,
    )


def test_a_lost_link_stops_asking_for_events_and_its_queue_sleeps(driver: str) -> None:
    run(
        driver,
        """
        never = Event()
        waiting = [start(room, room, never) for room in range(1, 4)]
        more = peer.begin(4)
        more.post(rows[4:5], ready=ctypes.addressof(never))  # gated, with more posted behind it
        more.post(rows[5:6])
        time.sleep(0.05)
        FAIL_LAUNCH.value = 1
        start(5, 6)
        wait_for(lambda: all(handle.state is WriteState.FAILED for handle in [*waiting, more]))
        busy = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - busy < 0.02
        never.fired = 1
        time.sleep(0.05)
        assert not any(landed(page) for page in range(1, 7)) and inbox.poll() == []
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
