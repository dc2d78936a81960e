"""One session with one prefill server: greet, learn the path, then messages both ways until either side ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from baton.decode.errors import PairRefusedError, SessionEndedError, WayLostError
from baton.decode.inboxes import Inboxes
from baton.decode.link import PrefillLink
from baton.engine.types import Failure
from baton.kvtransfer import routes
from baton.kvtransfer.identity import Identity
from baton.servicekit import get_logger
from baton.wire.v1 import bootstrap_pb2, common_pb2
from baton.workerkit import differences
from baton.workerkit.convert import failure_from_wire

log = get_logger(__name__)

Call = grpc.aio.StreamStreamCall[bootstrap_pb2.FromDecode, bootstrap_pb2.FromPrefill]

#: Longest that prefill may take to answer the hello, connect back and probe the path.
GREETING_TIMEOUT_S = 60.0
#: How long prefill may take to read the last messages.
LAST_WORDS_S = 1.0


class Answers(Protocol):
    """Who hears what prefill says of a lease."""

    def quiesced(self, room: int, generation: int) -> None: ...

    def declined(self, room: int, generation: int, failure: Failure) -> None: ...


class BootstrapSession:
    """`key` names it for good. Its inboxes are its own, so that this sender can be fenced alone. Used on the event loop; `send` from any thread."""

    def __init__(self, key: str, address: str, inboxes: Inboxes, hello: bootstrap_pb2.DecodeHello, here: Identity) -> None:
        self.key = key
        self.address = address
        self.inboxes = inboxes
        self._hello = hello
        self._here = here
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[bootstrap_pb2.FromDecode | None] = asyncio.Queue()
        self.transport = ""
        self.gigabytes_per_s = 0.0
        self.link: PrefillLink | None = None
        self._cut_off: asyncio.Future[str] = self._loop.create_future()

    def cut_off(self, reason: str) -> None:
        """Ends `serve`, after what is to be sent: what prefill writes does not arrive any more."""
        if not self._cut_off.done():
            self._cut_off.set_result(reason)

    def send(self, message: bootstrap_pb2.FromDecode) -> None:
        """What may gather is bounded by the leases of this session."""
        try:
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)
        except RuntimeError:  # the loop is closed: the process is ending
            return

    async def greet(self, call: Call) -> PrefillLink:
        """Raises PairRefusedError when the two must not exchange pages, SessionEndedError, TimeoutError or the call's own error."""
        began = time.monotonic()
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            await call.write(bootstrap_pb2.FromDecode(hello=self._hello))
            hello = (await self._expect(call, "hello")).hello
            differing = differences(self._hello.fingerprint, hello.fingerprint)
            if differing:
                text = f"decode {self._hello.instance_id} (here) and prefill {hello.instance_id} (there) do not fit: {'; '.join(differing)}"
                raise PairRefusedError(f"{text}; serve the same model with the same settings on both")
            verdict = (await self._expect(call, "verdict")).verdict
        self.transport = verdict.transport
        self.gigabytes_per_s = max(((point.bytes, point.gigabytes_per_s) for point in verdict.points), default=(0, 0.0))[1]
        speeds = {f"write_{point.bytes}_gb_s": round(point.gigabytes_per_s, 2) for point in verdict.points}
        took_ms = round((time.monotonic() - began) * 1e3)
        log.info("prefill connected", peer=hello.instance_id, address=self.address, transport=verdict.transport, took_ms=took_ms, **speeds)
        shares_clock = Identity.decode(hello.identity).boot_id == self._here.boot_id
        every = routes(self._hello.fingerprint.num_kv_heads, hello.tensor_parallel or 1, len(self.inboxes))
        self.link = PrefillLink(
            self.key, self.address, hello.instance_id, hello.identity, self.inboxes, every, shares_clock=shares_clock, send=self.send
        )
        return self.link

    async def serve(self, call: Call, answers: Answers) -> NoReturn:
        """Until the session ends, which raises SessionEndedError or the call's own error."""
        writer = asyncio.create_task(self._write(call))
        listener = asyncio.create_task(self._listen(call, answers))
        try:
            await asyncio.wait((listener, self._cut_off), return_when=asyncio.FIRST_COMPLETED)
            if not listener.done():
                self._outbox.put_nowait(None)
                await asyncio.wait((writer,), timeout=LAST_WORDS_S)
                raise WayLostError(self._cut_off.result())
            listener.result()
            raise AssertionError("listening ends with an error only")
        finally:
            writer.cancel()
            listener.cancel()
            await asyncio.gather(writer, listener, return_exceptions=True)

    async def _listen(self, call: Call, answers: Answers) -> NoReturn:
        while True:
            self._hear(await self._read(call), answers)

    def _hear(self, message: bootstrap_pb2.FromPrefill, answers: Answers) -> None:
        match message.WhichOneof("message"):
            case "quiesced":
                answers.quiesced(message.quiesced.room, message.quiesced.lease_generation)
            case "declined":
                failure = failure_from_wire(message.declined.failure, default_origin="prefill")
                answers.declined(message.declined.room, message.declined.lease_generation, failure)
            case kind:
                log.warning("message out of turn ignored", address=self.address, kind=kind)

    async def _expect(self, call: Call, kind: str) -> bootstrap_pb2.FromPrefill:
        message = await self._read(call)
        if message.WhichOneof("message") != kind:
            raise SessionEndedError(f"{self.address} sent {message.WhichOneof('message')} where {kind} was due")
        return message

    async def _read(self, call: Call) -> bootstrap_pb2.FromPrefill:
        message: Any = await call.read()
        if isinstance(message, bootstrap_pb2.FromPrefill):
            return message
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise PairRefusedError(details or "refused without a reason")
        if code is grpc.StatusCode.ABORTED:  # prefill's word for it (BootstrapServicer.Session)
            raise WayLostError(details or "prefill gave no reason")
        raise SessionEndedError(f"{code.name}: {details}" if details else code.name)

    async def _write(self, call: Call) -> None:
        """Ends when the stream is broken, which the reader sees as well, or with the last message."""
        while (message := await self._outbox.get()) is not None:
            await call.write(message)


MakeHello = Callable[[Inboxes], bootstrap_pb2.DecodeHello]


def make_hello(instance_id: str, fingerprint: common_pb2.KVFingerprint, num_pages: int, page_hash: str) -> MakeHello:
    """What this decode server says of itself, for each session's own inboxes."""

    def hello(inboxes: Inboxes) -> bootstrap_pb2.DecodeHello:
        message = bootstrap_pb2.DecodeHello(
            instance_id=instance_id, fingerprint=fingerprint, num_pages=num_pages, page_hash=page_hash, tensor_parallel=len(inboxes)
        )
        # A server that knows no ranks finds no invitation where there are several, and refuses; it must not take one rank's pool for all of it.
        if len(inboxes) == 1:
            message.invitation = inboxes.invitations[0]
        else:
            message.invitations.extend(inboxes.invitations)
        return message

    return hello
