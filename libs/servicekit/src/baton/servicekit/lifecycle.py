"""From start to exit of one service process: signals, the ready file, the parent's death."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping

import uvloop

from baton.servicekit.errors import ServicekitError, SettingsError, StartError
from baton.servicekit.files import write_atomically
from baton.servicekit.groups import ListenSettings
from baton.servicekit.logs import get_logger
from baton.servicekit.parent import ParentWatch

log = get_logger(__name__)

#: A thread that something came for (a doorbell, tokens to report) is to have Python's lock soon; Python's own 5 ms are half a decode step.
LOCK_TURN_S = 0.0002
#: How many more objects there may be before Python looks for cycles of garbage. One step's tokens for some hundred streams are more than its own 700.
YOUNG_OBJECTS = 10_000


class Lifecycle:
    """What a service's main coroutine is handed.

    `stopping` is set by the first SIGTERM or SIGINT, by `fail`, or when the parent is gone; main then drains and returns. A second signal
    cancels main. A signal before `ready` ends the process at once, with status 0: nothing is owed to anyone yet, and a thread that loads
    weights for minutes cannot be told to stop.
    """

    def __init__(self, service: str, instance_id: str, listen: ListenSettings) -> None:
        self.service = service
        self.instance_id = instance_id
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self.drain_timeout_s = listen.drain_timeout_s
        self.was_ready = False
        self._ready_file = listen.ready_file

    def ready(self, addresses: Mapping[str, str]) -> None:
        """Writes the ready file, whole or not at all: {"service", "instance_id", "pid", "addresses": {"grpc": "host:port", ...}}.

        Raises StartError where it cannot be written any more.
        """
        _collect_less()
        self.was_ready = True
        log.info("ready", **{f"{name}_address": address for name, address in addresses.items()})
        if self._ready_file is not None:
            record = {"service": self.service, "instance_id": self.instance_id, "pid": os.getpid(), "addresses": dict(addresses)}
            try:
                write_atomically(self._ready_file, json.dumps(record) + "\n")
            except OSError as error:
                problem = (
                    f"--ready-file={str(self._ready_file)!r} could be written when this service started and cannot be now: {error.strerror or error}"
                )
                raise StartError(problem) from error

    def not_ready(self) -> None:
        """Removes the ready file, if it is this process's."""
        if self._ready_file is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self._ready_file.read_text())["pid"] == os.getpid():
                self._ready_file.unlink()

    def fail(self, error: BaseException) -> None:
        """Asks for a stop because of `error`; the process then exits with 1. Only the first one counts."""
        if self.failure is None:
            self.failure = error
        self.stopping.set()

    def watch(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Stops the service when a task that should run for its whole life ends with an error."""
        task.add_done_callback(self._watched_ended)
        return task

    def _watched_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of the service failed", task=task.get_name(), exc_info=error)
            self.fail(error)

    async def stopped(self) -> None:
        """Waits until this process shall stop."""
        await self.stopping.wait()


def _collect_less() -> None:
    """What was made until now stays for good: it is not looked through again, which took a busy gateway's event loop 70 to 140 ms each time."""
    gc.collect()
    gc.freeze()
    gc.collect()  # full collections wait for a quarter as many new objects as the last one kept: now of what is not frozen
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def run(
    main: Callable[[Lifecycle], Awaitable[None]],
    *,
    service: str,
    instance_id: str,
    listen: ListenSettings,
) -> int:
    """Runs `main` on a fresh event loop until it returns; the process's exit status. The loop is uvloop's: a report of tokens costs a worker's front
    a fifth less on it than on asyncio's own.

    0: stopped as asked (before it was ready: without coming back here). 1: `main` raised or called `fail`. 2: it raised SettingsError: settings, or a
    file that they name, cannot be used, and starting again would not help. 130 / 143: a second SIGINT / SIGTERM cut the drain short.
    """
    sys.setswitchinterval(LOCK_TURN_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_supervise(main, service, instance_id, listen))


async def _supervise(main: Callable[[Lifecycle], Awaitable[None]], service: str, instance_id: str, listen: ListenSettings) -> int:
    life = Lifecycle(service, instance_id, listen)
    cut_short: list[int] = []
    task = asyncio.ensure_future(main(life))
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if not life.was_ready:
            log.info("stopped before it was ready", signal=signal.Signals(number).name)
            os._exit(0)
        elif life.stopping.is_set():
            cut_short.append(number)
            task.cancel()
        else:
            log.info("stopping", signal=signal.Signals(number).name, drain_timeout_s=life.drain_timeout_s)
            life.stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    watch = None if listen.parent_pid is None else ParentWatch(listen.parent_pid, listen.drain_timeout_s + 10.0)
    try:
        await task
    except asyncio.CancelledError:
        return 128 + cut_short[0] if cut_short else 1
    except ServicekitError as error:  # the operator's mistake: its message is enough
        print(f"baton-{service}: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, SettingsError) else 1
    except Exception as error:
        log.exception("failed", error=str(error))
        return 1
    finally:
        life.not_ready()
        if watch is not None:
            watch.close()
    if life.failure is not None:
        log.error("stopped by a failure", error=repr(life.failure))
        return 1
    return 0
