"""The console's files, as they lie in this package, and the headers under which a browser gets them."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

#: Nothing from anywhere else, nothing inline, no text made into markup, no frame around it.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}

_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


class Pages:
    """All of them in memory: nothing that a request says becomes a path."""

    def __init__(self) -> None:
        folder = files("baton.gateway.console") / "static"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}
        self._tags = {name: f'"{sha256(data).hexdigest()[:16]}"' for name, data in self._files.items()}

    def get(self, name: str, request: Request) -> Response | None:
        """None: there is no such file."""
        if name not in self._files:
            return None
        headers = HEADERS | {"etag": self._tags[name]}
        if request.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(self._files[name], headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
