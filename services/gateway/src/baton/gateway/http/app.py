"""Routes of the OpenAI-compatible front."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.body_limits import BodyLimits
from baton.gateway.callers import Caller, Doorkeeper
from baton.gateway.errors import GatewayError
from baton.gateway.http.body import read_body
from baton.gateway.http.deadline import deadline_of
from baton.gateway.http.errors import error_response, json_response
from baton.gateway.http.openapi import Limits, describe
from baton.gateway.http.parse import DetokenizeBody, ParsedBody, TokenizeBody, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from baton.gateway.http.responses import StreamedAnswer, WholeAnswer
from baton.gateway.http.shapes import ChatShape, CompletionShape, Shape, Style
from baton.gateway.inference import Inference
from baton.gateway.requests import InferenceRequest
from baton.gateway.rooms import RoomTable
from baton.gateway.withheld import without_addresses
from baton.servicekit import extract, get_logger

log = get_logger(__name__)

B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class OpenAIFront:
    inference: Inference
    rooms: RoomTable
    body_limits: BodyLimits
    started_at_s: int
    doorkeeper: Doorkeeper
    body_timeout_s: float
    #: Of other fronts on the same port.
    more_routes: tuple[Route, ...] = ()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model:path}", self.model, methods=["GET"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/ready", self.ready, methods=["GET"]),
                Route("/openapi.json", self.openapi, methods=["GET"]),
                *self.more_routes,
            ],
            exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        )

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat, ChatShape, "chatcmpl")

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion, CompletionShape, "cmpl")

    async def models(self, request: Request) -> Response:
        try:
            self._caller(request)
        except GatewayError as error:
            return error_response(error)
        return json_response({"object": "list", "data": self._models()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        try:
            self._caller(request)
            self.inference.check_model(name)
        except GatewayError as error:
            return error_response(error)
        return json_response(next(model for model in self._models() if model["id"] == name))

    async def tokenize(self, request: Request) -> Response:
        """The ids that a prompt, or a chat's messages, would be sent to the servers as."""

        async def answer(body: TokenizeBody) -> dict[str, Any]:
            tokens = await self.inference.tokenize(body.model, body.prompt)
            return {"count": len(tokens), "max_model_len": self.inference.models()[0].max_model_len, "tokens": tokens}

        return await self._convert(request, parse_tokenize, answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones included."""

        async def answer(body: DetokenizeBody) -> dict[str, Any]:
            return {"prompt": await self.inference.detokenize(body.model, body.tokens)}

        return await self._convert(request, parse_detokenize, answer)

    async def _convert(self, request: Request, parse: Callable[[dict[str, Any]], B], answer: Callable[[B], Awaitable[dict[str, Any]]]) -> Response:
        try:
            self._caller(request)
            body = await read_body(request, self.body_limits, self.body_timeout_s, parse)
            return json_response(await answer(body))
        except GatewayError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)

    async def health(self, request: Request) -> Response:
        """Whether this process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a request sent now would be taken; if not, why. Where keys are asked for, only their holders learn of the fleet."""
        ready = self.inference.fleet.ready and not self.rooms.draining
        if not self.doorkeeper.knows(request.headers.getlist("authorization")):
            return json_response({"ready": ready, "draining": self.rooms.draining}, 200 if ready else 503)
        problems = self.inference.fleet.problems()
        if self.doorkeeper.asks_for_keys:  # a client's key; operators have `baton fleet list`
            problems = [without_addresses(problem) for problem in problems]
        body = {
            "ready": ready,
            "draining": self.rooms.draining,
            "routes": len(self.inference.fleet.routes),
            "servers": self.inference.fleet.counts(),
            "problems": problems,
            "paths": [
                {
                    "prefill": prefill.instance_id,
                    "decode": decode.instance_id,
                    "transport": path.transport,
                    "gb_per_s": round(path.gigabytes_per_s, 3),
                }
                for prefill, decode, path in self.inference.fleet.paths()
            ],
            "rooms": len(self.rooms),
        }
        return json_response(body, 200 if ready else 503)

    async def openapi(self, request: Request) -> Response:
        """What this front takes and gives, with the limits that hold now."""
        model = self.inference.models()[0]
        return json_response(describe(Limits(model.id, model.vocab_size, model.max_model_len, self.body_limits.num_bytes), version("baton-gateway")))

    async def _answer(self, request: Request, parse: Callable[[dict[str, Any]], ParsedBody], shape: type[Shape], prefix: str) -> Response:
        accepted_at = time.monotonic()
        try:
            caller = self._caller(request)
        except GatewayError as error:  # which the doorkeeper has logged
            self.inference.metrics.refused(error.cause)
            return error_response(error)
        try:
            deadline = deadline_of(request.headers, accepted_at)
            body = await read_body(request, self.body_limits, self.body_timeout_s, parse)
        except GatewayError as error:
            log.info("request refused", code=error.code.name, cause=error.cause, reason=error.for_log)
            self.inference.metrics.refused(error.cause)
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        asked = InferenceRequest(
            model=body.model,
            prompt=body.prompt,
            sampling=body.sampling,
            accepted_at=accepted_at,
            deadline=deadline,
            caller=caller,
            priority=body.priority,
            request_id=body.request_id or request.headers.get("x-request-id", ""),
            trace=extract(request.headers.items()),
            more_prompts=body.more_prompts,
        )
        created_s = int(time.time())

        def make_shape(request_id: str, echoed: Sequence[str]) -> Shape:
            spell = self.inference.tokenizer.spell
            style = Style(spell, body.include_usage, echoed, body.sampling.top_logprobs, body.prompt_logprobs, body.sampling.n or 1)
            return shape(f"{prefix}-{request_id.removeprefix('req-')}", body.model, created_s, style)

        kind = StreamedAnswer if body.stream else WholeAnswer
        return kind(self.inference, asked, make_shape, echo=body.echo)

    def _caller(self, request: Request) -> Caller:
        """Raises UnauthenticatedError, ForbiddenError."""
        return self.doorkeeper.client(request.headers.getlist("authorization"))

    def _models(self) -> list[dict[str, Any]]:
        return [
            {"id": model.id, "object": "model", "created": self.started_at_s, "owned_by": "baton", "max_model_len": model.max_model_len}
            for model in self.inference.models()
        ]


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": f"http_{error.status_code}"}}
    return json_response(body, error.status_code, dict(error.headers or {}))


async def _internal_error(request: Request, error: Exception) -> Response:
    body = {"error": {"message": "the gateway failed; its log has the trace", "type": "server_error", "param": None, "code": "internal"}}
    return json_response(body, 500)
