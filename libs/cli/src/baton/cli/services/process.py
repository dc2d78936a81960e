"""One service as a child process: its command, its log file, the ready file that says where it listens."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.errors import ServiceStartError

LOG_LINES_SHOWN = 15
LOG_TAIL_BYTES = 64 * 1024
WAIT_POLL_S = 0.01


@dataclass(frozen=True)
class ServiceSpec:
    """What to run. `command` lacks the flags about this run (--ready-file, --parent-pid, --drain-timeout-s); `Service` adds them."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadyRecord:
    """What a service says of itself when it is ready. `addresses`: "grpc", "http", "bootstrap" -> host:port."""

    service: str
    instance_id: str
    pid: int
    addresses: dict[str, str]


class Service:
    """A running child. It ends with this process (it watches for that itself), and sees no terminal signal: whoever started it sends them."""

    def __init__(self, spec: ServiceSpec, run_dir: Path, drain_timeout_s: float) -> None:
        self.spec = spec
        self.log_path = run_dir / f"{spec.name}.log"
        self._ready_path = run_dir / f"{spec.name}.ready.json"
        self._ready_path.unlink(missing_ok=True)
        flags = ("--ready-file", str(self._ready_path), "--parent-pid", str(os.getpid()), "--drain-timeout-s", str(drain_timeout_s))
        with self.log_path.open("ab") as log:
            # Its own process group: Ctrl-C in the terminal reaches the supervisor alone, which then stops services in order.
            self._process = subprocess.Popen(
                [*spec.command, *flags],
                env=os.environ | dict(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_text(self) -> str | None:
        """None while it runs, else how it ended. It is not reaped, so that its process and group numbers stay its own."""
        if self._process.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            code, killed = ended.si_status, ended.si_code != os.CLD_EXITED
        else:
            code, killed = abs(self._process.returncode), self._process.returncode < 0
        return f"was killed by {signal.Signals(code).name}" if killed else f"exited with status {code}"

    def ready(self) -> ReadyRecord | None:
        """What the ready file says, once it is there. Raises ServiceStartError if it is not one of this process."""
        try:
            text = self._ready_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            record = ReadyRecord(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ServiceStartError(f"{self.name} wrote a ready file that cannot be read: {text!r}: {error}") from error
        if record.pid != self.pid:
            raise ServiceStartError(f"{self.name} has process id {self.pid}, but its ready file names {record.pid}")
        return record

    def last_lines(self) -> str:
        """The end of its log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])

    def send(self, signal_number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        if self.exit_text() is None:
            os.kill(self.pid, signal_number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within the time."""
        deadline = time.monotonic() + timeout_s
        while self.exit_text() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(WAIT_POLL_S)
        return True

    def reap(self) -> None:
        """SIGKILL to whatever is left of it and of its process group, then takes it off the process table. Idempotent."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
