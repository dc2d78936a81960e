"""Where a worker makes itself known."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from baton.servicekit import SettingsGroup
from baton.servicekit.etcd import parse_endpoint
from baton.wire.member import MAX_LEASE_S, MIN_LEASE_S, check_address


class JoinSettings(SettingsGroup):
    """Who is told that this server is there. Nobody by default: gateways then name it on their own command lines."""

    gateway_address: tuple[str, ...] = Field(default=(), description="Gateways that this server registers with, host:port of their gRPC.")
    registration_key_file: Path | None = Field(
        default=None, description="Its first line is the key that this server shows when it registers with a gateway."
    )
    etcd: tuple[str, ...] = Field(default=(), description="etcd where this server makes itself known: host:port or https://host:port of its members.")
    etcd_prefix: str = Field(default="/baton", min_length=1, description="Where in etcd the fleet is; the same on its gateways.")
    lease_s: int = Field(
        default=10, ge=MIN_LEASE_S, le=MAX_LEASE_S, description="Seconds after which a server that is not heard of is no longer in the fleet."
    )

    @field_validator("gateway_address")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            check_address(address, "--gateway-address")
        return value

    @field_validator("etcd")
    @classmethod
    def _check_endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_endpoint(text)
        return value
