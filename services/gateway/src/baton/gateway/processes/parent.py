"""The parent of several gateway processes: it starts them, watches them, and ends them. It answers nobody itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.gateway.config import GatewaySettings
from baton.gateway.processes.ports import hold
from baton.servicekit import Lifecycle, get_logger

log = get_logger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
#: After a process that has served for this long, the pause is the first one again.
STEADY_S = 60.0
#: What a process gets beyond the drain timeout before it is killed.
LAST_S = 15.0
POLL_S = 0.05


class ChildFailedError(Exception):
    """A process ended before the gateway was ever ready: it has said why."""

    def __init__(self, index: int, status: int) -> None:
        super().__init__(f"process {index} ended with status {status} before it was ready")
        self.status = status


class Parent:
    """`run` is the whole life. `status` is what the parent is to exit with where a process could not be started; 0 otherwise."""

    def __init__(self, settings: GatewaySettings, instance_id: str, argv: Sequence[str]) -> None:
        self._settings = settings
        self._instance_id = instance_id
        self._argv = list(argv)
        self._ports = (0, 0)
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self.status = 0

    async def run(self, life: Lifecycle) -> None:
        """Raises AddressUnavailableError. Returns once every process has ended."""
        settings = self._settings
        held, let_go = await asyncio.to_thread(
            hold, (settings.listen.host, settings.listen.port, "--port"), (settings.http_address_host, settings.http_port, "--http-port")
        )
        self._ports = (held[0].port, held[1].port)
        keepers: list[asyncio.Task[None]] = []
        with tempfile.TemporaryDirectory(prefix="baton-gateway-") as folder:
            try:
                # one first: a bad setting is then told once
                for group in (range(1), range(1, settings.processes)):
                    await asyncio.gather(*(self._first_start(index, Path(folder)) for index in group))
                keepers = [life.watch(asyncio.create_task(self._keep(index, Path(folder)))) for index in range(settings.processes)]
                life.ready(json.loads(self._ready_file(Path(folder), 0).read_text())["addresses"])
                await life.stopped()
            except ChildFailedError as error:
                self.status = error.status if error.status > 0 else 1
            finally:
                await self._end(keepers)
                let_go()

    # --- one process ----------------------------------------------------------------------------------------------------------

    def _ready_file(self, folder: Path, index: int) -> Path:
        return folder / f"{index}.ready.json"

    async def _start(self, index: int, folder: Path) -> asyncio.subprocess.Process:
        for left in (self._ready_file(folder, index), folder / str(index)):
            left.unlink(missing_ok=True)
        flags = {
            "--process-index": index,
            "--process-folder": folder,
            "--port": self._ports[0],
            "--http-port": self._ports[1],
            "--instance-id": f"{self._instance_id}-{index}",
            "--ready-file": self._ready_file(folder, index),
            "--parent-pid": os.getpid(),
        }
        command = [sys.executable, "-m", "baton.gateway.app", *self._argv, *(str(part) for flag in flags.items() for part in flag)]
        # a session of its own: Ctrl-C is for the parent, which then tells its processes, once
        process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        self._running[index] = process
        log.info("process started", process=index, process_id=process.pid)
        return process

    async def _first_start(self, index: int, folder: Path) -> None:
        """Raises ChildFailedError."""
        if not await self._becomes_ready(await self._start(index, folder), index, folder):
            raise ChildFailedError(index, self._running[index].returncode or 0)

    async def _becomes_ready(self, process: asyncio.subprocess.Process, index: int, folder: Path) -> bool:
        while not self._ready_file(folder, index).exists():
            if process.returncode is not None:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def _keep(self, index: int, folder: Path) -> None:
        """Starts process `index` anew whenever it ends, after a pause that doubles while it keeps ending."""
        backoff_s, loop = FIRST_BACKOFF_S, asyncio.get_running_loop()
        started_at = float("-inf")
        while True:
            status = await self._running[index].wait()
            backoff_s = FIRST_BACKOFF_S if loop.time() - started_at > STEADY_S else min(2 * backoff_s, MAX_BACKOFF_S)
            log.error("a process of the gateway ended", process=index, status=status, again_in_s=backoff_s)
            await asyncio.sleep(backoff_s)
            started_at = loop.time()
            await self._start(index, folder)

    # --- the end --------------------------------------------------------------------------------------------------------------

    async def _end(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Every process drains at the same time. A second signal to the parent, which cancels this, cuts their drains short."""
        for keeper in keepers:  # before anybody is told: none is started anew from here on
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        try:
            await self._stop_all(self._settings.listen.drain_timeout_s + LAST_S)
        except asyncio.CancelledError:
            await self._stop_all(LAST_S)
            raise

    async def _stop_all(self, timeout_s: float) -> None:
        self._tell(signal.SIGTERM)
        waiting = [asyncio.create_task(process.wait()) for process in self._running.values()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            if late:
                log.error("processes that did not end are killed", processes=len(late), allowed_s=timeout_s)
                self._tell(signal.SIGKILL)
                await asyncio.wait(late)

    def _tell(self, number: int) -> None:
        for process in self._running.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
