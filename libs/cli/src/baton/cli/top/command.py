"""`baton top`: follows the feed, draws it, and listens to keys."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Annotated

import grpc
import grpc.aio
import typer
from rich.live import Live

from baton.cli import reaching as to
from baton.cli.errors import CallError, UsageError
from baton.cli.output import whole_console
from baton.cli.top import keys
from baton.cli.top.known import Known
from baton.cli.top.screen import Choice, draw
from baton.wire.v1 import console_pb2, console_pb2_grpc

FIRST_S = 20.0
PAUSE_S = 1.0
NO_CONSOLE = "it serves no console: it was started with --no-console, or is older than this command"


def top(
    once: Annotated[bool, typer.Option("--once", help="Print what is there now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: all of it as one JSON object (docs/console.md).")] = False,
    address: to.Address = to.DEFAULT_ADDRESS,
    api_key_file: to.ApiKeyFile = None,
    tls_ca_file: to.TlsCaFile = None,
    tls_cert_file: to.TlsCertFile = None,
    tls_key_file: to.TlsKeyFile = None,
) -> None:
    """Shows a gateway's fleet, open rooms and finished requests as they come and go. Keys: q, arrows, Enter, f."""
    if as_json and not once:
        raise UsageError("--json goes with --once: a screen that changes is no JSON")
    if not once and not sys.stdout.isatty():
        raise UsageError("standard output is no terminal: use --once to print what is there now")
    found = to.reach(api_key_file, tls_ca_file, tls_cert_file, tls_key_file)
    try:
        asyncio.run(_once(address, found, as_json=as_json) if once else _Screen(address, found).run())
    except KeyboardInterrupt:
        return
    except grpc.aio.AioRpcError as error:
        details = NO_CONSOLE if error.code() is grpc.StatusCode.UNIMPLEMENTED else None
        raise to.call_error(address, error, details=details) from error
    except TimeoutError:
        raise CallError(f"the gateway at {address} said nothing for {FIRST_S:g} s") from None


async def _feed(address: str, found: to.Reach) -> AsyncIterator[console_pb2.WatchResponse]:
    async with to.channel_to(address, found) as channel:
        call = console_pb2_grpc.ConsoleStub(channel).Watch(console_pb2.WatchRequest(), metadata=found.metadata)
        async for message in call:
            yield message


async def _once(address: str, found: to.Reach, *, as_json: bool) -> None:
    known = Known()
    async with asyncio.timeout(FIRST_S):
        async for message in _feed(address, found):
            known.take(message.kind, message.json)
            if known.complete:
                break
    if not known.complete:
        raise CallError(f"the gateway at {address} ended the feed before it had told everything: try again")
    if as_json:
        print(json.dumps(known.as_json(), indent=1))
        return
    console = whole_console()
    with console.capture() as captured:
        console.print(draw(known, Choice(whole=True), console.height))
    for line in captured.get().splitlines():
        print(line.rstrip())


class _Screen:
    """The terminal for as long as somebody looks."""

    def __init__(self, address: str, found: to.Reach) -> None:
        self._address, self._found = address, found
        self._known, self._choice = Known(), Choice()
        self._done = asyncio.Event()
        self._live = Live(screen=True, auto_refresh=False, vertical_overflow="crop")

    async def run(self) -> None:
        """Raises AioRpcError where the gateway never answered, or does not let us watch."""
        loop = asyncio.get_running_loop()
        following = asyncio.create_task(self._follow())
        leaving = asyncio.create_task(self._done.wait())
        with self._live, keys.pressed(self._key):
            loop.add_signal_handler(signal.SIGWINCH, self._draw)
            await asyncio.wait((following, leaving), return_when=asyncio.FIRST_COMPLETED)
            loop.remove_signal_handler(signal.SIGWINCH)
        leaving.cancel()
        if following.done():
            following.result()
        following.cancel()
        await asyncio.gather(following, leaving, return_exceptions=True)

    async def _follow(self) -> None:
        """A gateway that goes away is waited for; one that refuses is not."""
        while True:
            try:
                async for message in _feed(self._address, self._found):
                    self._choice.note = ""
                    self._known.take(message.kind, message.json)
                    self._draw()
            except grpc.aio.AioRpcError as error:
                if not self._known.sections or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            self._choice.note = "the gateway does not answer; trying again"
            self._draw()
            await asyncio.sleep(PAUSE_S)

    def _draw(self) -> None:
        self._live.update(draw(self._known, self._choice, self._live.console.size.height), refresh=True)

    def _key(self, key: str) -> None:
        requests = [row["n"] for row in self._known.newest(only_failed=self._choice.only_failed)]
        if key == "q":
            self._done.set()
        elif key == "f":
            self._choice.only_failed, self._choice.selected, self._choice.opened = not self._choice.only_failed, None, False
        elif key == keys.ESCAPE:
            self._choice.opened = False
        elif key == keys.ENTER:
            self._choice.opened = self._choice.selected is not None
        elif key in (keys.UP, keys.DOWN) and requests:
            self._choice.selected = moved(requests, self._choice.selected, -1 if key == keys.UP else 1)
        self._draw()


def moved(requests: list[int], selected: int | None, by: int) -> int:
    """The request that is selected after one step; the newest at first."""
    if selected not in requests:
        return requests[0]
    return requests[max(0, min(len(requests) - 1, requests.index(selected) + by))]
