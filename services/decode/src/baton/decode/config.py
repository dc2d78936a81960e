"""Settings of the decode server: the one place of this package that reads the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from baton.servicekit import ListenSettings, LogSettings, MetricsSettings, Port, ServiceSettings, TlsSettings, TraceSettings, check_ports
from baton.servicekit.groups import METRICS_PORTS
from baton.workerkit import EngineSettings, JoinSettings, SglangSettings, TransferSettings

#: Prompt tokens beside the answers of one decode step, when nobody says how many.
MIXED_PROMPT_TOKENS = 256


class DecodeSettings(ServiceSettings):
    """The decode server of Baton: receives KV pages and streams answers; with --role plain it does both halves itself."""

    service: ClassVar[str] = "decode"
    listen: ListenSettings = ListenSettings(port=8004)
    role: Literal["decode", "plain"] = Field(default="decode", description="decode: prompts come from prefill servers; plain: it does both halves.")
    engine: EngineSettings
    transfer: TransferSettings = TransferSettings()
    digest: Literal["off", "sample", "all"] = Field(default="off", description="Whose landed pages are compared with what was sent.")
    link_wait_s: float = Field(default=5.0, gt=0, description="Seconds that a room may wait for a session with its prefill server.")
    revoke_timeout_s: float = Field(default=5.0, gt=0, description="Seconds until pages whose writer does not answer a revoke count as quarantined.")
    peer_linger_s: float = Field(default=60.0, ge=0, description="Seconds that a prefill server which no gateway names any more stays connected.")
    mixed_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt tokens of a step that also makes answers, which wait for them; when not set: 256 in role decode, no limit in plain.",
    )
    sglang: SglangSettings = SglangSettings()
    join: JoinSettings = JoinSettings()
    log: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    metrics: MetricsSettings = MetricsSettings(port=METRICS_PORTS["decode"])
    tls: TlsSettings = TlsSettings()

    def prompt_budget(self) -> int | None:
        """A plain server is what a split is compared with: it has the whole step, as elsewhere. Decode promises short steps."""
        return MIXED_PROMPT_TOKENS if self.mixed_prompt_tokens is None and self.role == "decode" else self.mixed_prompt_tokens

    @model_validator(mode="after")
    def _check_ports(self) -> DecodeSettings:
        host = self.listen.host
        check_ports([Port("--port", host, self.listen.port), Port("--sglang-port", host, self.sglang.port or 0), *self.metrics.ports(host)])
        return self


def load_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> DecodeSettings:
    """Of this process by default. Raises SettingsError."""
    return DecodeSettings.load(sys.argv[1:] if argv is None else argv, os.environ if environ is None else environ)
