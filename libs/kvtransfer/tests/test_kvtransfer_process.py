"""What the library does to the process it lives in: which libucp, whose signals, threads, forks, time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import baton.kvtransfer as kv
from baton.kvtransfer import Doorbell, WriteState
from baton.kvtransfer.ucx.library import wheel_library

PAGE = 4096
_API = Path(__file__).parents[1] / "src/baton/kvtransfer/native/api.hpp"
FUNCTIONS = tuple(name for name in re.findall(r"X\((ucp_\w+)\)", _API.read_text(encoding="utf-8")) if name != "ucp_get_version_string")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def compile_library(source: Path, target: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer is for us, not for the compiler
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(target), str(source)], env=environment, check=True)


OPEN = "from baton.kvtransfer import *\nagent = open_agent(AgentConfig('x'))\nregion = agent.allocate(4096)\ninbox = agent.open_inbox('y', region)\n"


PUBLIC = """
STATUS_DECLINED STATUS_OK Agent AgentConfig Closed Doorbell DoorbellsExhausted Inbox InboxStats IncompatiblePeer InvalidArgument Lease LeaseEvent
LeaseState LeaseTable LibraryConflict LibraryError LibraryNotFound LibraryTooOld Peer PeerError PeerLost PeerUnreachable PoolLayout ProbePoint
RankMemories RankMemory Region Route SpanArray TransferError UCXError UnexpectedTransport WriteHandle WriteState digest merge open_agent
open_ranks page_ids route_spans routes routes_into spans_for
"""


def test_the_public_face_is_what_is_promised() -> None:
    assert kv.__all__ == PUBLIC.split()
    assert all(hasattr(kv, name) for name in kv.__all__)


def test_importing_opens_no_library() -> None:
    done = run("import baton.kvtransfer, pathlib; print('libucp' in pathlib.Path('/proc/self/maps').read_text())")
    assert done.stdout.strip() == "False", done.stderr


def test_it_leaves_signals_environment_and_output_alone() -> None:
    done = run(
        """
        import os, re, pathlib, threading
        threading.Thread(target=print, args=("",), kwargs={"end": ""}).start()  # glibc takes a signal for itself with the first thread
        def handlers():
            return re.findall(r"Sig(?:Cgt|Ign):.*", pathlib.Path("/proc/self/status").read_text())
        before, environment = handlers(), dict(os.environ)
        from baton.kvtransfer import *
        agent = open_agent(AgentConfig("x"))
        region = agent.allocate(4096)
        inbox = agent.open_inbox("y", region)
        peer = agent.connect(inbox.invitation, region)
        assert handlers() == before, (handlers(), before)
        assert dict(os.environ) == environment
        agent.close()
        print("fine")
        """,
        UCX_TLS_OF_ANOTHER_PROGRAM="1",
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_the_named_library_is_used_and_described(tmp_path: Path) -> None:
    wheel = wheel_library()
    assert wheel is not None
    copy = tmp_path / "elsewhere"
    shutil.copytree(wheel.parent, copy)
    extra = wheel.parent.parent.parent / "libucx_cu13.libs"
    if extra.is_dir():
        shutil.copytree(extra, tmp_path / extra.name)
    named = copy / "libucp.so.0"
    done = run(OPEN + "print(agent.description)", BATON_UCX_LIBRARY=str(named))
    assert str(named.resolve()) in done.stdout, done.stderr
    assert "UCX 1." in done.stdout


def test_a_named_library_that_is_not_there_is_named() -> None:
    done = run(OPEN, BATON_UCX_LIBRARY="/no/such/libucp.so.0")
    assert "LibraryNotFound" in done.stderr
    assert "/no/such/libucp.so.0 (named by ucx_library or BATON_UCX_LIBRARY)" in done.stderr


@pytest.mark.parametrize(("version", "functions", "why"), [("1.8.0", (), "lacks ucp_am_send_nbx, "), ("1.17.1", FUNCTIONS, "ends the process")])
def test_a_library_that_is_too_old_is_refused_by_name(tmp_path: Path, version: str, functions: tuple[str, ...], why: str) -> None:
    source = tmp_path / "old.c"
    source.write_text(
        "".join([f'const char *ucp_get_version_string(void) {{ return "{version}"; }}\n', *(f"void {name}(void) {{}}\n" for name in functions)])
    )
    old = tmp_path / "libucp.so.0"
    compile_library(source, old)
    done = run(OPEN, BATON_UCX_LIBRARY=str(old))
    assert "LibraryTooOld" in done.stderr
    assert f"{old} (UCX {version}, named by ucx_library or BATON_UCX_LIBRARY) {why}" in done.stderr
    assert "at least 1.18 is needed" in done.stderr


def test_a_second_build_of_ucx_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int nothing;\n")
    other = tmp_path / "libucs-bd02cf62.so.0.0.0"  # as wheels rename what they bundle
    compile_library(source, other)
    done = run(f"import ctypes; ctypes.CDLL({str(other)!r})\n" + OPEN)
    assert "LibraryConflict" in done.stderr
    assert str(other) in done.stderr


def test_a_fork_is_told_that_the_agent_is_not_its_own() -> None:
    done = run(
        OPEN
        + """
import os
pid = os.fork()
if pid == 0:
    try:
        agent.allocate(1)
    except Closed as error:
        print("refused:", error, flush=True)
    agent.close()
    raise SystemExit(3)  # its exit handlers run: they must not wait for threads of the parent
print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
agent.close()
""",
        ASAN_OPTIONS=f"{os.environ.get('ASAN_OPTIONS', '')}:detect_leaks=0",  # what the parent's threads held is nobody's in the child
    )
    assert "refused: this agent was opened in another process" in done.stdout, done.stderr
    assert "child: 3" in done.stdout


def test_a_process_that_forgets_to_close_ends_all_the_same() -> None:
    done = run(OPEN + "peer = agent.connect(inbox.invitation, region)\nhandle = peer.begin(1)\nprint('end')")
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_an_idle_agent_sleeps(ucx: Any) -> None:
    sender, receiver = ucx.local(), ucx.remote()
    inbox, invitation = receiver.open_inbox()
    receiver.arm(inbox, 1, 1)  # a doorbell that nobody rings
    peer = sender.agent.connect(invitation, sender.region)
    peer.begin(1)
    time.sleep(0.1)
    ours, theirs, wall = time.process_time(), receiver.cpu_s(), time.monotonic()
    time.sleep(1.0)
    wall = time.monotonic() - wall
    assert time.process_time() - ours < 0.02 * wall
    assert receiver.cpu_s() - theirs < 0.05 * wall


def bare_wakes(count: int) -> list[float]:
    """From a write to a pipe to the wake-up of a thread that reads it: what the machine can do right now."""
    (reader, writer), woken = os.pipe(), []

    def sleep() -> None:
        for _ in range(count):
            os.read(reader, 1)
            woken.append(time.monotonic())

    thread = threading.Thread(target=sleep)
    thread.start()
    starts = []
    for _ in range(count):
        time.sleep(0.001)
        starts.append(time.monotonic())
        os.write(writer, b"x")
    thread.join()
    os.close(reader)
    os.close(writer)
    return [end - start for start, end in zip(starts, woken, strict=True)]


@pytest.mark.skipif("BATON_SANITIZED" in os.environ, reason="an instrumented core is not timed")
def test_a_sleeping_queue_wakes_at_once(shm: Any) -> None:
    """From `post` in the caller to the first put, beside bare wake-ups of the same moments; the quicker quarter of both, which other work on the
    machine disturbs least."""
    sender, receiver = shm.local(num_bytes=PAGE), shm.remote(num_bytes=PAGE)
    _, invitation = receiver.open_inbox()
    peer = sender.agent.connect(invitation, sender.region)
    rows = np.array([[0, 0, 64]], dtype=np.int64)
    waits: list[float] = []
    bare: list[float] = []
    for room in range(1, 201):
        if room % 20 == 1:
            bare += bare_wakes(20)
        handle = peer.begin(room)
        time.sleep(0.001)  # the queue's thread has gone to sleep again
        start = time.monotonic()
        handle.post(rows)
        while handle.first_post_time is None:
            time.sleep(0)
        waits.append(handle.first_post_time - start)
        handle.cancel()
    assert np.quantile(waits, 0.25) < max(50e-6, 1.5 * np.quantile(bare, 0.25))


def test_posting_is_cheap_and_leaves_the_interpreter_alone(shm: Any) -> None:
    sender, receiver = shm.local(num_bytes=10_000 * 4 * PAGE), shm.remote(num_bytes=10_000 * 4 * PAGE)
    inbox, invitation = receiver.open_inbox()
    peer = sender.agent.connect(invitation, sender.region)
    order = np.random.default_rng(0).permutation(10_000)
    rows = np.stack([np.arange(10_000) * 4 * PAGE, order * 4 * PAGE, np.full(10_000, 4 * PAGE)], axis=1)
    costs = []
    for room in range(1, 8):
        handle = peer.begin(room)
        start = time.perf_counter()
        handle.post(rows)
        costs.append((time.perf_counter() - start) / len(rows))
        slot = receiver.arm(inbox, room, 1)
        busy = time.thread_time()
        handle.finish(slot, Doorbell(room, 1))
        assert sender.state(room) is WriteState.DONE
        busy = time.thread_time() - busy
        assert handle.num_bytes == 10_000 * 4 * PAGE
        receiver.disarm(inbox, slot)
    assert min(costs) < 1.5e-6
    assert busy < 0.05 * (handle.done_time - handle.first_post_time)  # this thread slept while 164 MB moved
