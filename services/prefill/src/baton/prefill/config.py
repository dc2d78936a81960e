"""Settings of the prefill server: the one place of this package that reads the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from baton.servicekit import ListenSettings, LogSettings, MetricsSettings, Port, ServiceSettings, TlsSettings, TraceSettings, check_ports
from baton.servicekit.groups import METRICS_PORTS
from baton.workerkit import EngineSettings, JoinSettings, SglangSettings, TransferSettings


class PrefillSettings(ServiceSettings):
    """The prefill server of Baton: computes prompts and writes their KV pages into decode slots."""

    service: ClassVar[str] = "prefill"
    listen: ListenSettings = ListenSettings(port=8003)
    bootstrap_port: int = Field(default=8998, ge=0, le=65535, description="Port where decode servers publish their pages; 0 lets the system choose.")
    engine: EngineSettings
    transfer: TransferSettings = TransferSettings()
    layerwise: bool = Field(default=True, description="Each layer's pages go out when it is computed; off: all of them when the prompt is.")
    max_unmatched: int = Field(default=4096, ge=1, description="Published rooms that may await their request; one more is declined.")
    unmatched_timeout_s: float = Field(default=300.0, gt=0, description="Seconds that a published room may await its request.")
    ticket_secret_file: Path | None = Field(
        default=None, description="Secrets of room tickets, one a line, the gateway's too; with it, decode servers publish only what it signed."
    )
    sglang: SglangSettings = SglangSettings()
    join: JoinSettings = JoinSettings()
    log: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    metrics: MetricsSettings = MetricsSettings(port=METRICS_PORTS["prefill"])
    tls: TlsSettings = TlsSettings()

    @model_validator(mode="after")
    def _check_tickets(self) -> PrefillSettings:
        if self.sglang.port is not None and self.ticket_secret_file is not None:
            raise ValueError("--sglang-port and --ticket-secret-file exclude each other: a gateway that is not ours signs no tickets for its rooms")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> PrefillSettings:
        host = self.listen.host
        named = [Port("--port", host, self.listen.port), Port("--bootstrap-port", host, self.bootstrap_port)]
        check_ports([*named, Port("--sglang-port", host, self.sglang.port or 0), *self.metrics.ports(host)])
        return self


def load_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> PrefillSettings:
    """Of this process by default. Raises SettingsError."""
    return PrefillSettings.load(sys.argv[1:] if argv is None else argv, os.environ if environ is None else environ)
