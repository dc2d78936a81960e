"""Two ways of answering one request: whole, or as server-sent events. Both end the room as soon as the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.gateway.client_handler import LAST_WORDS_S
from baton.gateway.errors import GatewayError
from baton.gateway.http.errors import dump, error_body, error_response, json_response
from baton.gateway.http.protocol import IDLE_BYTES
from baton.gateway.http.shapes import Shape
from baton.gateway.inference import Inference
from baton.gateway.requests import InferenceRequest

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that buffers would hold the stream back.
    (b"x-accel-buffering", b"no"),
]

#: Gets the request id and, where they are to be echoed, the prompts' texts.
MakeShape = Callable[[str, Sequence[str]], Shape]


class WholeAnswer(Response):
    """One JSON body at the end."""

    def __init__(self, inference: Inference, request: InferenceRequest, make_shape: MakeShape, *, echo: bool = False) -> None:
        super().__init__()
        self._inference = inference
        self._request = request
        self._make_shape = make_shape
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: list[Response] = []

        async def answer() -> None:
            response.append(await self._answer())

        if await unless_gone(answer(), receive):
            await response[0](scope, receive, send)

    async def _answer(self) -> Response:
        try:
            async with self._inference.open(self._request) as answer:
                pieces = [piece async for piece in answer]
                echoed = await _texts(self._inference, self._request) if self._echo else ()
        except GatewayError as error:
            return error_response(error)
        shape = self._make_shape(answer.request_id, echoed)
        for number, prompt in enumerate(answer.prompts):
            shape.prompted(number, prompt, answer.logprobs_of(number))
        body = shape.whole(pieces, answer.usage)
        return json_response(body, headers={"x-request-id": answer.request_id})


class StreamedAnswer(Response):
    """Server-sent events. The status is sent with the first token, so that a request that fails before it has an honest one."""

    def __init__(self, inference: Inference, request: InferenceRequest, make_shape: MakeShape, *, echo: bool = False) -> None:
        super().__init__()
        self._inference = inference
        self._request = request
        self._make_shape = make_shape
        self._echo = echo
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[IDLE_BYTES] = b":\n\n"  # a comment
        await unless_gone(self._stream(scope, receive, send), receive)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(send)
        except GatewayError as error:
            if not self._started:
                await error_response(error)(scope, receive, send)
                return
            try:
                async with asyncio.timeout(LAST_WORDS_S):
                    await _events(send, dump(error_body(error)))
            except TimeoutError:
                return  # it reads nothing any more: the server closes the connection of an answer without an end
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer(self, send: Send) -> None:
        async with self._inference.open(self._request) as answer:
            echoed = await _texts(self._inference, self._request) if self._echo else ()
            shape = self._make_shape(answer.request_id, echoed)
            begun: set[int] = set()
            last: list[dict[str, Any]] = []  # goes out with what comes next
            async for piece in answer:
                if not self._started:
                    await self._start(send, answer.request_id)
                first = []
                if piece.choice not in begun:
                    begun.add(piece.choice)
                    number = piece.choice // answer.num_choices
                    shape.prompted(number, answer.prompts[number], answer.logprobs_of(number))
                    first = shape.first(piece.choice)
                await _events(send, *map(dump, [*last, *first]))
                if piece.text or piece.logprobs or piece.reasoning or piece.calls:
                    await _events(send, dump(shape.piece(piece)))
                last = [] if piece.finish is None else [shape.last(piece)]
            await _events(send, *map(dump, [*last, *shape.usage(answer.usage)]), b"[DONE]")

    async def _start(self, send: Send, request_id: str) -> None:
        self._started = True
        headers = [*EVENT_HEADERS, (b"x-request-id", request_id.encode("ascii"))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _texts(inference: Inference, request: InferenceRequest) -> list[str]:
    return [await inference.tokenizer.text_of(prompt) for prompt in request.prompts]


async def _events(send: Send, *data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": b"".join(b"data: %b\n\n" % part for part in data), "more_body": True})


async def unless_gone(work: Awaitable[None], receive: Receive) -> bool:
    """Runs `work` unless the client leaves first, which cancels it. The body must have been read: only a disconnect can still be received."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(gone, return_exceptions=True)
            await asyncio.gather(working, return_exceptions=True)
    if working.cancelled():
        return False
    working.result()
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
