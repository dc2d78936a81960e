"""Servers that can be measured."""

from urllib.parse import urlsplit

from baton.bench.errors import SettingError
from baton.bench.targets.base import Asking, Call, Piece, Target
from baton.bench.targets.grpc_target import Api, GrpcTarget
from baton.bench.targets.http_target import HttpTarget
from baton.bench.targets.tls import ClientTls

__all__ = ["Api", "Asking", "Call", "ClientTls", "GrpcTarget", "HttpTarget", "Piece", "Target", "open_target"]


def open_target(url: str, api: Api, asking: Asking, api_key: str | None = None, tls: ClientTls | None = None) -> Target:
    """grpc://host:port is Baton's gRPC; http(s)://host:port/v1 anything that speaks OpenAI's. Call on the event loop.

    api_key: shown as a bearer token. Raises SettingError.
    """
    parts = urlsplit(url)
    if parts.scheme == "grpc" and parts.netloc and not parts.path.strip("/"):
        return GrpcTarget(parts.netloc, api, asking, api_key, tls)
    if parts.scheme in ("http", "https") and parts.netloc:
        return HttpTarget(url, api, asking, api_key, tls)
    raise SettingError(f"target is {url!r}, but must be grpc://HOST:PORT or http(s)://HOST:PORT/v1")
