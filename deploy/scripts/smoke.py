"""Asks a running Baton the questions that matter, wherever it runs: exit status 0 when every answer is right.

    python smoke.py http://127.0.0.1:8000
    python smoke.py https://baton.example.org --api-key-file key --ca ca.pem --cert cert.pem --key key.pem

One line a check: the process lives, the fleet is ready, the model is listed, a chat is answered, the same chat streamed is the same answer with a
whole end, and a wrong request is refused by name. Needs Python alone. `--wait-s` waits for a fleet that still starts.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


class CheckError(Exception):
    """What was not as it should be."""


@dataclass(frozen=True)
class Front:
    """The gateway's HTTP address and how to reach it."""

    address: str
    key: str
    context: ssl.SSLContext | None
    timeout_s: float

    def get(self, path: str) -> tuple[int, Any]:
        return self._whole(urllib.request.Request(f"{self.address}{path}", headers=self._headers()))

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self._whole(self._request(path, body))

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """Data of each event, in order."""
        with self._open(self._request(path, body | {"stream": True})) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield line.removeprefix(b"data: ").decode().strip()

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        headers = self._headers() | {"content-type": "application/json"}
        return urllib.request.Request(f"{self.address}{path}", json.dumps(body).encode(), headers)

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def _open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        opened: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self.timeout_s, context=self.context)
        return opened

    def _whole(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with self._open(request) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raw = error.read()
            try:
                return error.code, json.loads(raw)
            except ValueError:
                raise CheckError(f"status {error.code} with {raw[:200]!r}, which is not of Baton") from None


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="smoke", description="Asks a running Baton the questions that matter.")
    parser.add_argument("address", help="http://host:port or https://host:port of the gateway")
    parser.add_argument("--model", help="model to ask (default: the one that is served)")
    parser.add_argument("--api-key-file", type=Path, help="file with the API key (default: the variable BATON_API_KEY)")
    parser.add_argument("--ca", type=Path, help="PEM certificates that sign the gateway's")
    parser.add_argument("--cert", type=Path, help="PEM certificate to show; with --key")
    parser.add_argument("--key", type=Path, help="PEM private key of --cert")
    parser.add_argument("--wait-s", type=float, default=0.0, help="how long the fleet may take to be ready")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long one answer may take")
    options = parser.parse_args(argv)
    if not options.address.startswith(("http://", "https://")):
        parser.error(f"{options.address!r} must begin with http:// or https://")
    if (options.cert is None) != (options.key is None):
        parser.error("--cert and --key go together")
    return options


def front_of(options: argparse.Namespace) -> Front:
    key = options.api_key_file.read_text().strip() if options.api_key_file else os.environ.get("BATON_API_KEY", "")
    context = None
    if options.address.startswith("https://"):
        context = ssl.create_default_context(cafile=options.ca)
        if options.cert:
            context.load_cert_chain(options.cert, options.key)
    return Front(options.address.rstrip("/"), key, context, options.timeout_s)


def wait_ready(front: Front, wait_s: float) -> str:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            status, body = front.get("/ready")
            said = json.dumps(body)
        except (OSError, http.client.HTTPException, CheckError) as error:
            status, said = 0, str(error)
        if status == 200:
            return said
        if time.monotonic() >= deadline:
            raise CheckError(f"not ready within {wait_s:g} s: status {status}, {said}")
        time.sleep(0.5)


def live(front: Front) -> str:
    status, body = front.get("/health")
    expect(status == 200, f"status {status}: {body}")
    return str(body.get("status"))


def model_of(front: Front, asked: str | None) -> str:
    status, body = front.get("/v1/models")
    expect(status == 200, f"status {status}: {body}")
    names = [model["id"] for model in body["data"]]
    expect(bool(names) and (asked is None or asked in names), f"serves {names}, not {asked}")
    return asked or names[0]


def chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": _QUESTION, "temperature": 0, "max_tokens": 24}


def whole_answer(front: Front, model: str) -> str:
    status, body = front.post("/v1/chat/completions", chat(model))
    expect(status == 200, f"status {status}: {body}")
    text: str = body["choices"][0]["message"]["content"]
    expect(bool(text.strip()), "the answer is empty")
    expect(body["usage"]["completion_tokens"] > 0, f"usage {body['usage']}")
    return text


def streamed_answer(front: Front, model: str, whole: str) -> str:
    events = list(front.stream("/v1/chat/completions", chat(model)))
    expect(bool(events) and events[-1] == "[DONE]", f"the stream ends with {events[-1:]}")
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    expect(text == whole, f"streamed {text!r}, whole {whole!r}")
    return f"{len(chunks)} events"


def refusal(front: Front, model: str) -> str:
    status, body = front.post("/v1/chat/completions", chat(model) | {"max_tokens": 0})
    expect(status == 400, f"status {status} for max_tokens=0: {body}")
    expect("max_tokens" in body["error"]["message"], f"the refusal does not name the field: {body}")
    return "max_tokens=0 is refused by name"


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckError(otherwise)


def run(front: Front, asked: str | None, wait_s: float) -> None:
    """Raises what the first check that fails raises."""

    def check(name: str, ask: Callable[[], str]) -> str:
        began = time.monotonic()
        try:
            found = ask()
        except CheckError as error:
            raise CheckError(f"{name}: {error}") from None
        sys.stdout.write(f"ok  {name:<9} {(time.monotonic() - began) * 1e3:7.0f} ms  {found[:160]}\n")
        return found

    check("ready", lambda: wait_ready(front, wait_s))
    check("live", lambda: live(front))
    model = check("model", lambda: model_of(front, asked))
    whole = check("chat", lambda: whole_answer(front, model))
    check("stream", lambda: streamed_answer(front, model, whole))
    check("refusal", lambda: refusal(front, model))


def main(argv: list[str]) -> int:
    options = arguments(argv)
    try:
        run(front_of(options), options.model, options.wait_s)
    except (CheckError, OSError, http.client.HTTPException, KeyError, ValueError) as error:
        sys.stderr.write(f"FAILED {error if isinstance(error, CheckError) else repr(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
