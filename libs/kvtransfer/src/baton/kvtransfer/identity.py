"""Which process this is, and whether it is gone: what a fence needs where memory is shared.

A process that is gone cannot store into shared memory any more. "Gone" is read from the kernel of the same host and the same pid namespace, and a
process id that was given to another process is told apart by its start time.
"""

from __future__ import annotations

import errno
import os
import select
import struct
from dataclasses import dataclass
from pathlib import Path

from baton.kvtransfer.envelope import seal, unseal
from baton.kvtransfer.errors import InvalidArgument

_MAGIC = b"BKID"
_VERSION = 1
_NUMBERS = struct.Struct("<QQQQ")


@dataclass(frozen=True, slots=True)
class Identity:
    """boot_id: of the host's kernel. pid_namespace, ipc_namespace: inode numbers. pid, start_ticks: as in /proc/<pid>/stat."""

    instance_id: str
    boot_id: str
    pid_namespace: int
    ipc_namespace: int
    pid: int
    start_ticks: int

    @classmethod
    def of_this_process(cls, instance_id: str) -> Identity:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        start_ticks = _start_ticks(os.getpid())
        if start_ticks is None:
            raise InvalidArgument("/proc/self/stat cannot be read: mount /proc, a fence needs it")
        return cls(instance_id, boot_id, os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/ipc").st_ino, os.getpid(), start_ticks)

    def encode(self) -> bytes:
        numbers = _NUMBERS.pack(self.pid_namespace, self.ipc_namespace, self.pid, self.start_ticks)
        return seal(_MAGIC, _VERSION, {1: self.instance_id.encode(), 2: self.boot_id.encode(), 3: numbers})

    @classmethod
    def decode(cls, data: bytes) -> Identity:
        """Raises InvalidArgument for damaged bytes, IncompatiblePeer for another version."""
        fields = unseal("identity", _MAGIC, _VERSION, data)
        try:
            numbers = _NUMBERS.unpack(fields[3])
            return cls(fields[1].decode(), fields[2].decode(), *numbers)
        except (KeyError, struct.error, UnicodeDecodeError) as error:
            raise InvalidArgument(f"identity lacks a field or has a malformed one: {error!r}") from error

    def shares_memory_with(self, other: Identity) -> bool:
        """Whether the two can map one another's memory and watch one another's process."""
        return (self.boot_id, self.pid_namespace, self.ipc_namespace) == (other.boot_id, other.pid_namespace, other.ipc_namespace)


def is_gone(writer: Identity, here: Identity) -> bool:
    """True only on proof that `writer`'s process, threads and all, has ended. `here` is this process."""
    if writer.boot_id != here.boot_id:
        return False
    if writer.pid_namespace != here.pid_namespace:
        return False
    return _is_another(writer) or _has_ended(writer)


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat; None when there is no such process, or it is hidden (hidepid). The command's name may hold spaces and
    parentheses."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def _is_another(writer: Identity) -> bool:
    """Whether the process id is somebody else's by now."""
    ticks = _start_ticks(writer.pid)
    return ticks is not None and ticks != writer.start_ticks


def _has_ended(writer: Identity) -> bool:
    """A process that nobody waited for yet is a zombie: its pidfd is readable once its last thread ended."""
    try:
        descriptor = os.pidfd_open(writer.pid)
    except OverflowError:
        return True  # no process has such a number
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return True  # nobody has it, or a thread of another process
        raise
    try:
        if _is_another(writer):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)
