"""Whether a service of Baton is serving, by grpc.health.v1: exit status 0 when it is, 1 with one line that says why not.

    python healthy.py --ready-file /run/baton/ready.json     # where the service wrote its addresses
    python healthy.py 10.0.0.1:8001                          # any address

Health checks of the images and `exec` probes of a cluster run it every few seconds, so it imports grpc and nothing of Baton. Where the services have
TLS files (BATON_TLS_CERT_FILE, BATON_TLS_KEY_FILE, BATON_TLS_CA_FILE, or the flags here) it shows the same certificate.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

_SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
_STATES = {b"": "UNKNOWN", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN"}


class NotHealthyError(Exception):
    """Why it is not."""


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="healthy", description="Whether a service of Baton is serving.")
    parser.add_argument("address", nargs="?", help="host:port of its gRPC")
    parser.add_argument("--ready-file", type=Path, help="the service's ready file, instead of an address")
    parser.add_argument("--timeout-s", type=float, default=3.0)
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--tls-{name}-file", type=Path, default=os.environ.get(f"BATON_TLS_{name.upper()}_FILE") or None)
    options = parser.parse_args(argv)
    if (options.address is None) == (options.ready_file is None):
        parser.error("give an address or --ready-file, one of them")
    return options


def address_of(ready_file: Path) -> str:
    try:
        address: str = json.loads(ready_file.read_text(encoding="utf-8"))["addresses"]["grpc"]
    except FileNotFoundError:
        raise NotHealthyError(f"{ready_file} is not there: the service is not ready yet, or has ended") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotHealthyError(f"{ready_file} cannot be read: {error!r}") from error
    return address


def channel_to(address: str, options: argparse.Namespace) -> grpc.Channel:
    if options.tls_ca_file is None:
        return grpc.insecure_channel(address)
    try:
        ca = Path(options.tls_ca_file).read_bytes()
        cert, key = (Path(path).read_bytes() if path else None for path in (options.tls_cert_file, options.tls_key_file))
    except OSError as error:
        raise NotHealthyError(f"a TLS file cannot be read: {error}") from error
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert))


def check(address: str, options: argparse.Namespace) -> None:
    """Raises NotHealthyError."""
    with channel_to(address, options) as channel:
        call: Callable[..., bytes] = channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=None, response_deserializer=None)
        try:
            answer = call(b"", timeout=options.timeout_s)
        except grpc.RpcError as error:
            told: Any = error  # a call as well, which its type does not say
            raise NotHealthyError(f"{address} does not answer: {told.code().name}: {told.details()}") from None
    if answer != _SERVING:
        raise NotHealthyError(f"{address} says {_STATES.get(answer, repr(answer))}")


def main(argv: list[str]) -> int:
    options = arguments(argv)
    try:
        check(options.address or address_of(options.ready_file), options)
    except NotHealthyError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
