"""Servers that can be measured."""

from urllib.parse import urlsplit

from baton.bench.errors import SettingError
from baton.bench.targets.base import Asking, Call, Piece, Target
from baton.bench.targets.grpc_target import Api, GrpcTarget
from baton.bench.targets.http_target import HttpTarget

__all__ = ["Api", "Asking", "Call", "GrpcTarget", "HttpTarget", "Piece", "Target", "open_target"]


def open_target(url: str, api: Api, asking: Asking, api_key: str | None = None) -> Target:
    """grpc://host:port is Baton's gRPC; http(s)://host:port/v1 anything that speaks OpenAI's. Call on the event loop. Raises SettingError."""
    parts = urlsplit(url)
    if parts.scheme == "grpc" and parts.netloc and not parts.path.strip("/"):
        return GrpcTarget(parts.netloc, api, asking)
    if parts.scheme in ("http", "https") and parts.netloc:
        return HttpTarget(url, api, asking, api_key)
    raise SettingError(f"target is {url!r}, but must be grpc://HOST:PORT or http(s)://HOST:PORT/v1")
