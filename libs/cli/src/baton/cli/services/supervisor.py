"""Starts services, waits until they are healthy, notices when one is gone, and leaves none behind."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from signal import SIGTERM
from types import TracebackType
from typing import Self

from baton.cli.errors import ServiceLostError, ServiceStartError
from baton.cli.services.health import is_serving
from baton.cli.services.process import ReadyRecord, Service, ServiceSpec

POLL_S = 0.05
# What a service gets beyond its own drain timeout before it is killed. A gateway that people keep calling takes up to 5 s (GrpcServer.stop) and a
# second for its clients' last messages.
KILL_MARGIN_S = 10.0


class StopAskedError(Exception):
    """The user asked for a stop while something was still waited for. Control flow of the command, not a failure."""


class Supervisor:
    """Owns the processes it started. Use as a context manager: leaving it, by whatever road, stops them all.

    Signal handlers may set `stop_asked`, which ends every wait for a service, and `cut_short`, which ends the waiting for drains. `tick` is
    called again and again while something is waited for. Not thread-safe: one thread drives it.
    """

    def __init__(
        self,
        run_dir: Path,
        drain_timeout_s: float,
        stop_asked: threading.Event | None = None,
        cut_short: threading.Event | None = None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self._drain_timeout_s = drain_timeout_s
        self._stop_asked = stop_asked or threading.Event()
        self._cut_short = cut_short or threading.Event()
        self._services: list[Service] = []
        self.tick: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    @property
    def services(self) -> Sequence[Service]:
        return tuple(self._services)

    def start(self, spec: ServiceSpec) -> Service:
        """Starts a process. Start the front door last: `stop` lets it drain before the servers behind it."""
        service = Service(spec, self.run_dir, self._drain_timeout_s)
        self._services.append(service)
        return service

    def wait_ready(self, services: Iterable[Service], timeout_s: float) -> dict[str, ReadyRecord]:
        """Waits until every one of `services` has said where it listens and reports SERVING.

        Raises ServiceStartError with the last log lines if one of all services ends or the time is over, StopAskedError if the user wants to stop.
        """
        deadline = time.monotonic() + timeout_s
        waiting, records = list(services), dict[str, ReadyRecord]()
        while waiting:
            self._fail_if_one_ended(ServiceStartError, "before it was ready")
            for service in tuple(waiting):
                record = service.ready()
                if record is not None and is_serving(record.addresses["grpc"]):
                    records[service.name] = record
                    waiting.remove(service)
            if waiting and time.monotonic() > deadline:
                names = ", ".join(service.name for service in waiting)
                raise ServiceStartError(f"not ready within {timeout_s:g} s: {names}; {_log_of(waiting[0])}")
            if waiting:
                self._pause()
        return records

    @property
    def stop_asked(self) -> bool:
        return self._stop_asked.is_set()

    def watch(self) -> None:
        """Returns when the user asks for a stop. Raises ServiceLostError when a service ends."""
        while not self._stop_asked.is_set():
            self.check()
            self.tick()
            self._stop_asked.wait(POLL_S)

    def check(self) -> None:
        """Raises ServiceLostError if a service has ended."""
        self._fail_if_one_ended(ServiceLostError, "while it was serving")

    def stop(self) -> list[str]:
        """SIGTERM to the service started last (the front door), then to all others at once; each gets its drain, then SIGKILL. Idempotent.

        Returns the names of services that had to be killed. A second Ctrl-C (`cut_short`) ends the waiting.
        """
        killed = self._end(self._services[-1:]) + self._end(self._services[:-1])
        self.tick()
        self._services.clear()
        return killed

    def _end(self, services: Sequence[Service]) -> list[str]:
        for service in services:
            service.send(SIGTERM)
        deadline = time.monotonic() + self._drain_timeout_s + KILL_MARGIN_S
        killed = []
        for service in services:
            if not self._ended(service, deadline):
                killed.append(service.name)
            service.reap()
        return killed

    def _ended(self, service: Service, deadline: float) -> bool:
        while not service.wait(POLL_S):
            self.tick()
            if self._cut_short.is_set() or time.monotonic() > deadline:
                return False
        return True

    def _pause(self) -> None:
        self.tick()
        if self._stop_asked.wait(POLL_S):
            raise StopAskedError

    def _fail_if_one_ended(self, kind: type[ServiceStartError] | type[ServiceLostError], when: str) -> None:
        for service in self._services:
            ended = service.exit_text()
            if ended is not None:
                raise kind(f"{service.name} {ended} {when}; {_log_of(service)}")


def _log_of(service: Service) -> str:
    return f"the end of {service.log_path}:\n{service.last_lines()}"
