"""The `baton` command."""

import os

# gRPC's core writes lines of its own to standard error, into an answer on a terminal and between a service's JSON. It reads this when it is
# imported, so it is set before any module here does that; the services that we start inherit it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__: list[str] = []
