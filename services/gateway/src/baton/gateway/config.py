"""The gateway's settings. Nothing else here reads the environment."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from baton.gateway.dialect import ReasoningFormat, ToolCallFormat
from baton.gateway.retry import KVLoadFailurePolicy
from baton.gateway.routing import RoutingPolicy
from baton.servicekit import ListenSettings, LogSettings, MetricsSettings, Port, ServiceSettings, TlsSettings, TraceSettings, check_ports
from baton.servicekit.etcd import parse_endpoint
from baton.servicekit.groups import METRICS_PORTS
from baton.wire.member import check_address


class GatewaySettings(ServiceSettings):
    """Baton's front door: OpenAI HTTP and gRPC in front of prefill, decode and plain servers."""

    service: ClassVar[str] = "gateway"

    listen: ListenSettings = ListenSettings(port=8001)
    log: LogSettings = LogSettings()
    traces: TraceSettings = TraceSettings()
    metrics: MetricsSettings = MetricsSettings(port=METRICS_PORTS["gateway"])
    tls: TlsSettings = TlsSettings()
    client_ca_file: Path | None = Field(default=None, description="PEM certificates that sign clients' ones; --tls-ca-file when not set.")
    client_certificates: bool = Field(default=True, description="Whether clients must show a certificate, where a file says who signs them.")
    http_host: str | None = Field(default=None, description="Address of the OpenAI endpoints; --host when not set.")
    http_port: int = Field(default=8000, ge=0, le=65535, description="Port of the OpenAI endpoints; 0 lets the system choose.")

    processes: int = Field(default=1, ge=1, le=64, description="Processes that share the ports; above 1, this one only starts and watches them.")
    process_index: int | None = Field(default=None, ge=0, description="Which of --processes this one is; set by the one that starts them.")
    process_folder: Path | None = Field(default=None, description="Where the processes answer each other; set by the one that starts them.")

    console: bool = Field(default=True, description="Whether /console and `baton top` show what passes through; off, nothing is recorded for them.")

    prefill: tuple[str, ...] = Field(default=(), description="Prefill servers, host:port of their gRPC.")
    decode: tuple[str, ...] = Field(default=(), description="Decode servers, host:port of their gRPC.")
    plain: tuple[str, ...] = Field(default=(), description="Plain servers (prefill and decode in one), host:port of their gRPC.")
    registration: bool = Field(default=False, description="Whether workers may make themselves known to this gateway (their --gateway-address).")
    registration_key_file: Path | None = Field(
        default=None, description="Keys that registering workers must show one of, one a line; needed unless the gateway listens on loopback."
    )
    etcd: tuple[str, ...] = Field(default=(), description="etcd where workers make themselves known: host:port or https://host:port of its members.")
    etcd_prefix: str = Field(default="/baton", min_length=1, description="Where in etcd this fleet is; the same on its workers.")
    etcd_grace_s: float = Field(default=30.0, ge=0, description="Seconds that servers which an etcd lost while it was away get to register again.")
    routing: RoutingPolicy = Field(default="least-load", description="How a request's servers are chosen.")
    routing_balance: float = Field(
        default=1.5,
        ge=1,
        description="prefix-aware: load of a server, as a multiple of the mean, above which a prefix no longer keeps requests there.",
    )
    stall_limit_s: float = Field(default=30.0, gt=0, description="Seconds without progress after which a server gets no new requests.")

    silence_limit_s: float = Field(
        default=3.0, gt=0, description="Seconds without a sign of life of a server after which other servers are preferred to it."
    )
    retries: int = Field(default=2, ge=0, le=10, description="Times a request whose servers fail goes on in another room.")
    kv_load_failure_policy: KVLoadFailurePolicy = Field(
        default="fail",
        description="fail: a request ends when a server fails after decode's first token; recompute: its tokens are computed again, and it goes on.",
    )
    local_prefill_max_tokens: int = Field(
        default=0,
        ge=0,
        description="Prompts of which decode lacks at most so many tokens are prefilled there where that is predicted to be done sooner; 0: never.",
    )

    model_path: Path = Field(description="Hugging Face folder of the model: its tokenizer and chat template (no weights are read).")
    model_name: str | None = Field(default=None, min_length=1, description="Name that clients ask for; the folder's name when not set.")

    tool_call_format: ToolCallFormat = Field(
        default="auto",
        description="How the model writes tool calls. auto: as its chat template says; none: it is offered no tools. Where the template has no "
        "place for tools, a format given here has them told in a system message.",
    )
    reasoning_format: ReasoningFormat = Field(
        default="auto",
        description="think: what a chat's answer has between <think> and </think> is told apart from it; auto: where the chat template has these "
        "marks; none: it is text.",
    )

    bootstrap_timeout_s: float = Field(default=300.0, gt=0, description="Seconds that a room may wait for decode's pages to be known to prefill.")
    waiting_timeout_s: float = Field(default=300.0, gt=0, description="Seconds that a room may then wait for its first KV page to be sent.")
    transfer_timeout_s: float = Field(default=300.0, gt=0, description="Seconds from a room's first KV page until decode has all of them.")
    api_key_file: Path | None = Field(
        default=None,
        description="Hashes of clients' API keys, written by `baton key new`; with it, requests need a key. Without it everybody may ask.",
    )
    key_max_concurrent: int | None = Field(
        default=None,
        ge=1,
        description="Answers that one API key may have open or waiting, each of a request's several counted; no limit when not set.",
    )
    key_requests_per_minute: int | None = Field(
        default=None, ge=1, description="Requests that one API key may begin in a minute; no limit when not set."
    )
    key_tokens_in_flight: int | None = Field(
        default=None, ge=1, description="Tokens, prompts and max_tokens together, that one API key may have open or waiting; no limit when not set."
    )
    ticket_secret_file: Path | None = Field(
        default=None, description="Secrets of room tickets, one a line, prefill's too; the first signs which decode server may publish a room."
    )
    request_timeout_s: float = Field(default=1800.0, gt=0, description="Seconds for a whole request; a client's own deadline may be shorter.")
    max_rooms: int = Field(default=4096, ge=1, description="Requests that may be open at once; others wait in the queue.")
    max_queue: int = Field(default=1024, ge=0, description="Requests that may wait for a place, fairly between API keys; one more is refused.")
    queue_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that a request may wait for a place; its deadline counts as well.")
    max_body_bytes: int | None = Field(
        default=None,
        ge=1024,
        description="Bytes of one request, over HTTP and over gRPC; what the model's longest prompt can need, at most 16 MiB, when not set.",
    )
    http_max_connections: int = Field(default=8192, ge=1, description="HTTP connections that may be open at once; one more is told to come later.")
    http_max_head_bytes: int = Field(default=32 * 1024, ge=1024, description="Bytes of an HTTP request's line and headers; gRPC's metadata too.")
    http_head_timeout_s: float = Field(default=20.0, gt=0, description="Seconds for the headers of a request, and for a connection's first.")
    http_body_timeout_s: float = Field(default=60.0, gt=0, description="Seconds for the body of an HTTP request.")
    grpc_max_connections: int = Field(default=8192, ge=1, description="gRPC connections that may be open at once; one more is closed.")
    grpc_idle_timeout_s: float = Field(default=600.0, ge=1, description="Seconds after which a gRPC connection without a call is closed.")
    unread_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that a part of an answer may wait for a client that reads nothing.")
    max_buffered_tokens: int = Field(default=16384, ge=1, description="Tokens that may wait for a slow client before its request fails.")
    tokenizer_threads: int = Field(default=2, ge=1, le=64, description="Threads that tokenise long prompts.")

    @field_validator("prefill", "decode", "plain")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for address in value:
            check_address(address, f"--{info.field_name}")
        return value

    @field_validator("etcd")
    @classmethod
    def _check_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_endpoint(text)
        return value

    @field_validator("model_path")
    @classmethod
    def _check_folder(cls, value: Path) -> Path:
        if not value.is_dir():
            raise ValueError("there is no such folder")
        return value

    @model_validator(mode="after")
    def _check_fleet(self) -> GatewaySettings:
        named = [*self.prefill, *self.decode, *self.plain]
        twice = sorted({address for address in named if named.count(address) > 1})
        if twice:
            raise ValueError(f"--prefill, --decode and --plain name {', '.join(twice)} more than once")
        if self.registration or self.etcd:
            return self  # others may join later
        if bool(self.prefill) != bool(self.decode):
            have, lack = ("--prefill", "--decode") if self.prefill else ("--decode", "--prefill")
            raise ValueError(f"{have} is set and {lack} is not: a pair needs both")
        if not named:
            raise ValueError("no servers are named: set --prefill and --decode, or --plain; or let them join with --registration or --etcd")
        return self

    @model_validator(mode="after")
    def _check_processes(self) -> GatewaySettings:
        if (self.process_index is None) != (self.process_folder is None):
            raise ValueError("--process-index and --process-folder belong together: leave both to --processes")
        if self.process_index is not None and self.process_index >= self.processes:
            raise ValueError(f"--process-index={self.process_index} is none of --processes={self.processes}, which count from 0")
        instance_id, room = self.listen.instance_id, 60
        if self.starts_others and instance_id is not None and len(instance_id) > room:
            raise ValueError(
                f"--instance-id={instance_id} has {len(instance_id)} characters; with --processes it has at most {room}: a number follows"
            )
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> GatewaySettings:
        fronts = [Port("--port", self.listen.host, self.listen.port), Port("--http-port", self.http_address_host, self.http_port)]
        check_ports([*fronts, *self.metrics.ports(self.listen.host, self.processes)])
        return self

    @model_validator(mode="after")
    def _check_registration(self) -> GatewaySettings:
        if self.registration and self.registration_key_file is None and not self.listen.is_loopback():
            raise ValueError(
                f"--registration on --host={self.listen.host} lets everybody who reaches it offer a server, which then sees prompts: "
                "set --registration-key-file"
            )
        return self

    @model_validator(mode="after")
    def _check_client_tls(self) -> GatewaySettings:
        if self.client_ca_file is not None and self.tls.cert_file is None:
            raise ValueError("--client-ca-file is set and --tls-cert-file is not: clients show certificates over TLS only")
        return self

    @property
    def starts_others(self) -> bool:
        """Whether this process is the parent of those that serve."""
        return self.processes > 1 and self.process_index is None

    @property
    def front_tls(self) -> TlsSettings:
        """TLS of the ports that clients come to. Another authority for clients keeps them from passing for a gateway before workers."""
        ca_file = (self.client_ca_file or self.tls.ca_file) if self.client_certificates else None
        return self.tls.model_copy(update={"ca_file": ca_file})

    @property
    def served_name(self) -> str:
        return self.model_name or self.model_path.resolve().name

    @property
    def http_address_host(self) -> str:
        return self.http_host or self.listen.host
