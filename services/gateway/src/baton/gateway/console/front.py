"""The console over HTTP: the page, its feed as server-sent events, and the drain that an operator orders."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.gateway.callers import Doorkeeper
from baton.gateway.console.feed import Feed, Frame
from baton.gateway.console.pages import HEADERS, Pages
from baton.gateway.discovery.drain import drain_instance
from baton.gateway.errors import DrainingError, GatewayError, MissingFieldError
from baton.gateway.fleet import Fleet
from baton.gateway.http.body import read_json_object
from baton.gateway.http.errors import error_response, json_response
from baton.gateway.http.responses import EVENT_HEADERS, unless_gone

MAX_BODY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ConsoleFront:
    feed: Feed
    fleet: Fleet
    doorkeeper: Doorkeeper
    pages: Pages
    body_timeout_s: float

    def routes(self) -> list[Route]:
        return [
            Route("/console", self.to_page, methods=["GET"]),
            Route("/console/", self.page, methods=["GET"]),
            Route("/console/feed", self.watch, methods=["GET"]),
            Route("/console/drain", self.drain, methods=["POST"]),
            Route("/console/{name}", self.page, methods=["GET"]),
        ]

    async def to_page(self, request: Request) -> Response:
        """Relative, so that it holds behind a proxy that puts the gateway below a path."""
        return RedirectResponse("console/", headers=HEADERS)

    async def page(self, request: Request) -> Response:
        """Holds nothing of the fleet: it needs no key."""
        found = self.pages.get(request.path_params.get("name", "index.html"), request)
        if found is None:
            raise HTTPException(404, "the console has no such file")
        return found

    async def watch(self, request: Request) -> Response:
        shown = request.headers.getlist("authorization")
        try:
            operator = self.doorkeeper.watches_as_operator(shown)
        except GatewayError as error:
            return error_response(error)
        return _Events(self, shown, operator=operator)

    async def drain(self, request: Request) -> Response:
        """As `baton fleet drain`: {"instance_id": ...}, with a key of role admin."""
        try:
            operator = self.doorkeeper.require_admin(request.headers.getlist("authorization"))
            body = await read_json_object(request, MAX_BODY_BYTES, self.body_timeout_s)
            name = body.get("instance_id")
            if not isinstance(name, str) or not name:
                raise MissingFieldError("instance_id", "instance_id must name the server that is to drain")
            rooms = drain_instance(self.fleet, name, operator)
        except GatewayError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        return json_response({"instance_id": name, "rooms": rooms})


class _Events(Response):
    """The feed for one reader, until it leaves, its key is withdrawn, or the gateway ends."""

    def __init__(self, front: ConsoleFront, shown: Sequence[str], *, operator: bool) -> None:
        super().__init__()
        self._front, self._shown, self._operator = front, shown, operator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(self._stream(scope, receive, send), receive)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._front.feed.read(operator=self._operator)) as frames:
                async for frame in frames:
                    if self._front.doorkeeper.watches_as_operator(self._shown) is not self._operator:
                        break
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                    await send({"type": "http.response.body", "body": event(frame), "more_body": True})
        except GatewayError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
        if not started:  # the gateway ends
            await error_response(DrainingError())(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def event(frame: Frame) -> bytes:
    """One server-sent event. The JSON is one line."""
    kind, data = frame
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), data)
