"""Bodies of requests that several test files send over HTTP."""

from __future__ import annotations

from gateway_harness import MODEL

USER = [{"role": "user", "content": "hello"}]
CHAT = {"model": MODEL, "messages": USER}
