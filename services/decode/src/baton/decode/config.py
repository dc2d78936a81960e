"""Settings of the decode server: the one place of this package that reads the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from baton.servicekit import ListenSettings, LogSettings, ServiceSettings, TlsSettings, TraceSettings
from baton.workerkit import EngineSettings, TransferSettings


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
    log: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    tls: TlsSettings = TlsSettings()


def load_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> DecodeSettings:
    """Of this process by default. Raises SettingsError."""
    return DecodeSettings.load(sys.argv[1:] if argv is None else argv, os.environ if environ is None else environ)
