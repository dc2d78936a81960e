"""Copies what services log to a stream as it appears, each line behind the service's name."""

from collections.abc import Callable, Sequence

from baton.cli.services.process import Service


class LogFollower:
    """Call `poll` now and then with the services that run. Half a line waits for its other half."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line
        self._offsets: dict[str, int] = {}

    def poll(self, services: Sequence[Service]) -> None:
        for service in services:
            with service.log_path.open("rb") as log:
                log.seek(self._offsets.get(service.name, 0))
                whole, newline, _ = log.read().rpartition(b"\n")
            self._offsets[service.name] = self._offsets.get(service.name, 0) + len(whole) + len(newline)
            for line in whole.decode("utf-8", errors="replace").splitlines():
                self._write_line(f"[{service.name}] {line}")
