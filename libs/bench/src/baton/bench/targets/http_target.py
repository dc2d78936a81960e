"""Any OpenAI-compatible server over HTTP: streaming completions and chat completions."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from baton.bench.errors import RequestFailedError
from baton.bench.request import Request
from baton.bench.targets.base import Asking, Call, Piece
from baton.bench.targets.grpc_target import Api
from baton.bench.targets.tls import ClientTls

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
#: How much of a refusal's body is kept.
DETAIL_CHARS = 300


class HttpTarget:
    """`base_url` ends where the server's /completions begins, usually in /v1. `api_key` goes into the Authorization header, nowhere else."""

    def __init__(self, base_url: str, api: Api, asking: Asking, api_key: str | None = None, tls: ClientTls | None = None) -> None:
        self.name = f"{base_url} ({api})"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        # The generator owns every deadline, and no pool of connections may hold a request back.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, verify=(tls or ClientTls()).context())
        self._url = base_url.rstrip("/") + PATHS[api]
        self._api, self._asking = api, asking

    async def aclose(self) -> None:
        await self._client.aclose()

    def prepare(self, request: Request) -> Call:
        asking = self._asking
        body: dict[str, Any] = {"model": asking.model, "temperature": asking.temperature, "max_tokens": request.max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if asking.ignore_eos:
            body["ignore_eos"] = True
        if self._api == "chat":
            body["messages"] = [{"role": message.role, "content": message.content} for message in request.messages]
        else:
            body["prompt"] = request.prompt
        return _HttpCall(self._client, self._client.build_request("POST", self._url, content=json.dumps(body)))


class _HttpCall:
    def __init__(self, client: httpx.AsyncClient, request: httpx.Request) -> None:
        self._client, self._request = client, request

    async def stream(self) -> AsyncIterator[Piece]:
        try:
            response = await self._client.send(self._request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    detail = (await response.aread()).decode(errors="replace")[:DETAIL_CHARS]
                    raise RequestFailedError(f"http_{response.status_code}", detail)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if line.startswith("data:"):
                        yield _piece(data)
            finally:
                await response.aclose()
        except httpx.ConnectError as error:
            raise RequestFailedError("connect", str(error)) from error
        except httpx.HTTPError as error:
            raise RequestFailedError("disconnect", f"{type(error).__name__}: {error}") from error
        raise RequestFailedError("cut_short", "the stream ended without [DONE]")


def _piece(data: str) -> Piece:
    """One event. HTTP does not say how many tokens a piece of text is: it counts as one, and the usage at the end tells."""
    try:
        body = json.loads(data)
        if "error" in body:
            raise RequestFailedError("stream_error", json.dumps(body["error"])[:DETAIL_CHARS])
        choice = body["choices"][0] if body.get("choices") else {}
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        usage = body.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        numbers = {} if cached is None else {"cached_tokens": cached}
        finish = choice.get("finish_reason") or ""
        return Piece(text, int(bool(text)), finish, usage.get("prompt_tokens"), usage.get("completion_tokens"), numbers)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise RequestFailedError("bad_event", f"{data[:DETAIL_CHARS]!r} is not a chunk of a completion") from error
