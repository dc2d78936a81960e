"""Writes docs/environment.md from the services' own settings; `--check` says whether it is what they say now."""

from __future__ import annotations

import sys

from generated import write_or_check

from baton.decode.config import DecodeSettings
from baton.gateway.config import GatewaySettings
from baton.prefill.config import PrefillSettings
from baton.servicekit import ServiceSettings
from baton.servicekit.fields import Setting

SERVICES: tuple[type[ServiceSettings], ...] = (GatewaySettings, PrefillSettings, DecodeSettings)

INTRODUCTION = """# Settings

Made by `python docs/environment.py` from the services' settings; `tox run -e environment` checks that it is up to date.

A flag wins over a service's own variable, that one over a shared variable, and all over the default. An empty variable counts as not set. A list
is comma separated; a flag that is true or false also has its `--no-` form. A bad value, and a variable with a service's prefix that is no setting,
stop the start-up with the name and the value. In Kubernetes set `enableServiceLinks: false`: the variables that it makes for a service called
`baton-gateway` would clash with the gateway's.

Three more variables are read: `BATON_UCX_LIBRARY` (path of a libucp.so.0 to use instead of the system's or the wheel's), `BATON_CACHE_DIR` (where
`baton model fetch` puts models, by default `~/.cache/baton`), and OpenTelemetry's own `OTEL_EXPORTER_OTLP_*`, `OTEL_TRACES_SAMPLER*`,
`OTEL_METRIC_*`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*` and `OTEL_SPAN_*`, where traces or metrics are on.

A trace goes from the client's own headers (W3C trace context) through gateway, prefill, the transfer (a span for each group of layers and transfer
queue) and decode; a room's states are events of its spans. `OTEL_TRACES_SAMPLER` chooses which requests are traced. One whose room fails is, all the
same, by all that had a part in it: spans that are not chosen are recorded and kept for a while (those of the last 512 traces), and sent when one
of their trace says so. A client that leaves, or a request that is refused, is no failure. `--no-traces-failures` turns that off, and with it its
cost, about 0.05 ms of processor time a request.

gRPC's core writes lines of its own to standard error, which are not JSON. `baton up` keeps them back with `GRPC_VERBOSITY=ERROR` unless that is
set already; set it yourself where services are started in another way.

So does UCX, on prefill and decode servers: `[time] [host:process:thread] file:line UCX  WARN  ...`, on standard error between the JSON lines. A
collector of JSON skips lines that begin with `[`. `UCX_LOG_FILE=/var/log/baton/ucx-%p.log` puts them into a file of each process,
`UCX_LOG_LEVEL=fatal` silences them (`error` leaves errors; `warn` is UCX's default). What goes wrong on a path is logged by Baton itself, and is in
`/ready` and the room's failure, either way.
"""


def page() -> str:
    parts = [INTRODUCTION, "## Every service\n\n" + shared_table()]
    parts += [f"## {settings.service}\n\n{(settings.__doc__ or '').strip()}\n\n{table(own(settings))}" for settings in SERVICES]
    return "\n".join(parts)


def own(settings: type[ServiceSettings]) -> list[Setting]:
    return [row for row in settings.describe() if row.shared_env is None and row.env.startswith("BATON_")]


def shared_table() -> str:
    """Settings that one variable can set for all services. The name in brackets is that of one service alone."""
    rows: dict[str, str] = {}
    for settings in SERVICES:
        for row in settings.describe():
            name = row.shared_env or row.env
            if row.shared_env or not row.env.startswith("BATON_"):
                alone = f" (`{name.replace('BATON_', 'BATON_<SERVICE>_', 1)}`)" if row.shared_env else ""
                rows[name] = f"| `{name}`{alone} | `{row.flag}` | {cells(row)} |"
    return "\n".join(["| variable | flag | takes | default | what it is |", "|---|---|---|---|---|", *rows.values()]) + "\n"


def table(rows: list[Setting]) -> str:
    lines = [f"| `{row.env}` | `{row.flag}` | {cells(row)} |" for row in rows]
    return "\n".join(["| variable | flag | takes | default | what it is |", "|---|---|---|---|---|", *lines]) + "\n"


def cells(row: Setting) -> str:
    default = row.default_text if row.required or row.default in (None, "", ()) else f"`{row.default_text}`"
    return f"{row.type_name.replace(' |', ',')} | {default} | {row.description}"


if __name__ == "__main__":
    sys.exit(write_or_check(__file__, __doc__, page()))
