"""What users do to it: forks that go on with what the parent opened, too few descriptors, too much memory, settings that contradict."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import baton.kvtransfer as kv
from baton.kvtransfer import AgentConfig, open_agent
from baton.kvtransfer import identity as identity_module
from baton.kvtransfer.identity import Identity

PAGE = 4096


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False)


FORK = """
import os, sys
import numpy as np
from baton.kvtransfer import *

agent = open_agent(AgentConfig("parent", transport=sys.argv[1], probe_bytes=1 << 20))
region = agent.allocate(4096)
inbox = agent.open_inbox("self", region)
peer = agent.connect(inbox.invitation, region)
handle = peer.begin(1)
slot = inbox.arm(1, 1)
page = np.array([[0, 0, 4096]])
child = os.fork()
if child == 0:
    refused = 0
    for act in (
        lambda: agent.open_inbox("x", region), lambda: agent.connect(inbox.invitation, region), lambda: peer.begin(2), lambda: peer.probe(),
        lambda: handle.post(page), lambda: handle.finish(slot, Doorbell(1, 1)), lambda: inbox.arm(2, 1), lambda: inbox.disarm(slot),
        lambda: inbox.poll(), lambda: inbox.stats, lambda: inbox.fence(None),
    ):
        try:
            act()
        except Closed as error:
            assert "opened in another process" in str(error)
            refused += 1
    for close in (handle.cancel, peer.close, inbox.close, region.close, agent.close):  # what cleans up behind an exception
        close()
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
handle.post(page)
handle.finish(slot, Doorbell(1, 1))
while handle.state is WriteState.OPEN:
    pass
assert handle.state is WriteState.DONE
agent.connect(inbox.invitation, region).close()  # the inbox was not fenced
agent.close()
print("fine")
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_fork_neither_waits_for_what_the_parent_opened_nor_closes_it(transport: str) -> None:
    done = run(FORK, transport, ASAN_OPTIONS=f"{os.environ.get('ASAN_OPTIONS', '')}:detect_leaks=0")  # the parent's threads are not in the child
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


HIDDEN = """
import os, subprocess, sys
from baton.kvtransfer.identity import Identity, is_gone
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"], check=True)
here = Identity.of_this_process("here")
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
there = Identity.decode(bytes.fromhex(sys.argv[1]))
assert not os.path.exists(f"/proc/{there.pid}")
print(is_gone(there, here), flush=True)
sys.stdin.read()  # until it has ended
print(is_gone(there, here))
"""


def test_a_process_that_proc_hides_is_not_gone() -> None:
    """Another user's, where /proc is mounted with hidepid: no file of it is to be seen, and it writes on."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespace of its own without root")
    sleeper = subprocess.Popen(["sleep", "60"])
    identity = replace(Identity.of_this_process("there"), pid=sleeper.pid, start_ticks=identity_module._start_ticks(sleeper.pid))
    command = ["unshare", "-m", sys.executable, "-c", HIDDEN, identity.encode().hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == "False\n"
        finally:
            sleeper.kill()
            sleeper.wait()
        said, _ = watcher.communicate("", timeout=30)
    assert said == "True\n"


DESCRIPTORS = """
import os, resource, sys, time
import numpy as np
from baton.kvtransfer import *

def config(name):
    return AgentConfig(name, transport=sys.argv[1], probe_bytes=0, connect_timeout_s=2, transfer_queues=1)

def room(number):
    inbox = receiver.open_inbox("sender", pool, 4)
    peer = sender.connect(inbox.invitation, source)
    handle = peer.begin(number)
    handle.post(np.array([[0, 0, 4096]]))
    handle.finish(inbox.arm(number, 1), Doorbell(number, 1))
    while handle.state is WriteState.OPEN:
        pass
    assert handle.state is WriteState.DONE, handle.error
    peer.close()
    inbox.close()

def num_open():
    return len(os.listdir("/proc/self/fd"))

receiver, sender = open_agent(config("receiver")), open_agent(config("sender"))
pool, source = receiver.allocate(4096), sender.allocate(4096)
room(1)
before, (soft, hard) = num_open(), resource.getrlimit(resource.RLIMIT_NOFILE)
said = set()
for spare in range(0, 40, 3):
    kept = [receiver.open_inbox("sender", pool, 4) for _ in range(3)]
    invitations = [inbox.invitation for inbox in kept]
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open() + spare, hard))
    for act in (*(lambda each=each: sender.connect(each, source) for each in invitations), lambda: receiver.open_inbox("sender", pool, 4)):
        try:
            kept.append(act())
        except (UCXError, PeerUnreachable, OSError) as error:
            said.add(str(error))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    while kept:
        kept.pop().close()
deadline = time.monotonic() + 10
while num_open() > before and time.monotonic() < deadline:
    time.sleep(0.01)
assert num_open() <= before, (num_open(), before)
room(2)
sender.close()
receiver.close()
print(*said, sep="\\n")
"""


@pytest.mark.skipif("BATON_SANITIZED" in os.environ, reason="a sanitizer looks at memory through a pipe, and takes it for broken where none is left")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_too_few_descriptors_are_named_and_nothing_of_it_stays(transport: str) -> None:
    done = run(DESCRIPTORS, transport)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "descriptors are free, which a UCX worker may need: raise the limit (ulimit -n)" in done.stdout
    if transport == "shm":
        assert "cannot be watched: [Errno 24] Too many open files" in done.stdout


def test_memory_that_is_not_there_is_named_with_its_size(ucx: Any) -> None:
    with open_agent(AgentConfig("x", transport=ucx.transport)) as agent:
        with pytest.raises(kv.UCXError, match=f"{1 << 60} bytes"):
            agent.allocate(1 << 60)
        with pytest.raises(kv.InvalidArgument, match=r"at most 2\*\*63"):
            agent.register((1 << 64) - 1, 1)  # rounded up to pages it would end at address 0


def test_an_agent_of_host_memory_waits_for_no_cuda_event(ucx: Any) -> None:
    sender, receiver = ucx.local(num_bytes=PAGE), ucx.remote(num_bytes=PAGE)
    handle = sender.agent.connect(receiver.open_inbox()[1], sender.region).begin(1)
    with pytest.raises(kv.InvalidArgument, match=r"ready=0x3039: .*AgentConfig\.device is empty"):
        handle.post(np.array([[0, 0, PAGE]]), ready=12345)
    assert handle.state is kv.WriteState.OPEN


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fingerprint": {"page_size": 16}}, r"fingerprint\['page_size'\]=16 is a int, must be a string"),
        ({"ucx_options": {"TLS": None}}, r"ucx_options\['TLS'\]=None is a NoneType"),
        ({"device": 0}, "device=0 is a int, must be a string"),  # 0 would be taken for host memory
        ({"instance_id": None}, "instance_id=None is a NoneType"),
    ],
)
def test_settings_that_are_no_text_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(kv.InvalidArgument, match=why):
        AgentConfig(**{"instance_id": "x", **settings})


OPEN = "import logging\nlogging.basicConfig()\nfrom baton.kvtransfer import *\nopen_agent(AgentConfig('x', transport='{}')).close()\nprint('fine')\n"


@pytest.mark.parametrize(("transport", "ours"), [("tcp", "tcp"), ("auto", "")])
def test_what_of_the_environment_is_not_used_is_said(transport: str, ours: str) -> None:
    done = run(OPEN.format(transport), UCX_TLS="sm", UCX_LOG_LEVEL="fatal")
    assert done.stdout == "fine\n", done.stderr
    assert "not used, since an agent chooses these itself: UCX_TLS=sm; use AgentConfig's transport and ucx_options" in done.stderr
    assert run(OPEN.format(transport), UCX_LOG_LEVEL="fatal").stderr == ""
    if ours:
        assert run(OPEN.format(transport), UCX_TLS=ours, UCX_LOG_LEVEL="fatal").stderr == ""


def test_a_network_device_that_is_not_there_is_named_beside_those_that_are() -> None:
    done = run(OPEN.format("tcp"), UCX_NET_DEVICES="nope0")
    assert "UCXError: ucp_init failed: No such device: nothing to go over with TLS=tcp, NET_DEVICES=nope0" in done.stderr
    assert "network devices that are up here: " in done.stderr


def test_a_library_that_is_no_libucp_is_told_from_one() -> None:
    done = run(OPEN.format("shm"), BATON_UCX_LIBRARY="libm.so.6")
    assert "LibraryNotFound" in done.stderr
    assert "libm.so.6 (named by ucx_library or BATON_UCX_LIBRARY): it is no libucp: it lacks ucp_am_send_nbx, " in done.stderr
