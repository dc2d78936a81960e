"""Groups of settings that every service composes."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from baton.servicekit.files import check_writable
from baton.servicekit.identity import check_instance_id
from baton.servicekit.ports import Port
from baton.servicekit.settings import SettingsGroup


class ListenSettings(SettingsGroup):
    """Where a service listens, and how it starts and ends."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0 lets the system choose.")
    advertise_host: str | None = Field(default=None, description="Host under which others reach this service; the listening one when not set.")
    instance_id: str | None = Field(default=None, description="Identity of this run; drawn at random when not set. Never reuse one.")
    ready_file: Path | None = Field(
        default=None, description="File that is written once the service is ready (JSON with its addresses), removed at exit."
    )
    parent_pid: int | None = Field(default=None, gt=0, description="Process whose end also ends this service.")
    drain_timeout_s: float = Field(default=30.0, ge=0, description="Seconds that running requests get to end after SIGTERM.")

    @field_validator("instance_id")
    @classmethod
    def _check_instance_id(cls, value: str | None) -> str | None:
        return None if value is None else check_instance_id(value)

    @field_validator("ready_file")
    @classmethod
    def _check_ready_file(cls, value: Path | None) -> Path | None:
        """Now, and not when the model is loaded and ports are open."""
        if value is not None:
            check_writable(value)
        return value

    def is_loopback(self) -> bool:
        """Whether only this host's processes reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def advertised_host(self) -> str:
        """The host that others are told."""
        if self.advertise_host:
            return self.advertise_host
        try:
            any_interface = ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            any_interface = False
        return socket.gethostname() if any_interface else self.host


class LogSettings(SettingsGroup):
    """What is logged, and how."""

    prefix: ClassVar[str] = "log_"
    shared: ClassVar[bool] = True
    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level that is logged.")
    format: Literal["auto", "json", "console"] = Field(default="auto", description="Shape of log lines; auto: console on a terminal, else JSON.")


class TraceSettings(SettingsGroup):
    """Where spans go. Everything else is set by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER, ...)."""

    prefix: ClassVar[str] = "traces_"
    exporter: Literal["none", "console", "otlp"] = Field(
        default="none", description="Where spans are sent; console is standard error.", json_schema_extra={"env": "OTEL_TRACES_EXPORTER"}
    )
    failures: bool = Field(default=True, description="Whether traces of what failed are sent though OTEL_TRACES_SAMPLER did not choose them.")


#: Where Prometheus finds each service when nobody says otherwise.
METRICS_PORTS = {"gateway": 9464, "prefill": 9465, "decode": 9466}


class MetricsSettings(SettingsGroup):
    """Where metrics go. How OTLP pushes is set by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_METRIC_EXPORT_INTERVAL, ...)."""

    prefix: ClassVar[str] = "metrics_"
    exporter: tuple[Literal["none", "prometheus", "otlp"], ...] = Field(
        default=("none",),
        description="How metrics are had: prometheus scrapes the metrics port, otlp pushes; both may be named.",
        json_schema_extra={"env": "OTEL_METRICS_EXPORTER"},
    )
    host: str | None = Field(default=None, description="Address of the metrics port; --host when not set.")
    port: int = Field(
        default=METRICS_PORTS["gateway"], ge=0, le=65535, description="Port that Prometheus scrapes, at /metrics; 0 lets the system choose."
    )
    tls: bool = Field(default=True, description="Whether the metrics port shows, and asks for, the certificates of --tls-*, where there are any.")

    @field_validator("exporter")
    @classmethod
    def _check_exporter(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "none" in value and len(value) > 1:
            raise ValueError("none stands alone: leave it or the others out")
        return value

    def ports(self, host: str, num_processes: int = 1) -> list[Port]:
        """Where Prometheus will find a service that listens on `host`: a port for each of its processes; none where it does not look."""
        if "prometheus" not in self.exporter:
            return []
        numbers = [self.port + index if self.port else 0 for index in range(num_processes)]
        return [
            Port("--metrics-port" if not index else f"--metrics-port + {index}", self.host or host, number) for index, number in enumerate(numbers)
        ]


class TlsSettings(SettingsGroup):
    """TLS of a service's gRPC port and of its channels to other services. Without files everything is plain text."""

    prefix: ClassVar[str] = "tls_"
    shared: ClassVar[bool] = True
    cert_file: Path | None = Field(default=None, description="PEM certificate chain of this service.")
    key_file: Path | None = Field(default=None, description="PEM private key of this service.")
    ca_file: Path | None = Field(default=None, description="PEM certificates that sign peers; with it, servers demand client certificates.")

    @model_validator(mode="after")
    def _check_pair(self) -> TlsSettings:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("--tls-cert-file and --tls-key-file go together: set both or neither")
        return self
