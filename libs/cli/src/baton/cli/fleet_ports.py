"""The ports of a fleet on one machine, looked at before anything is started: a service would name a wrong one only after it has loaded the model."""

import argparse
import socket
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from baton.cli.errors import UsageError
from baton.servicekit import MetricsSettings, Port, ServiceSettings, SettingsGroup, join_address
from baton.servicekit import check_ports as check_equal
from baton.servicekit.fields import describe
from baton.servicekit.groups import METRICS_PORTS
from baton.servicekit.sources import read_environment

#: `baton up` has no flag of its own for it.
_HINT = " (--worker-flag=--metrics-port=0, and each server's log says which it has; a gateway's: BATON_GATEWAY_METRICS_PORT)"


class _Scraped(ServiceSettings):
    metrics: MetricsSettings = MetricsSettings()


def scraped(service: str, names: Sequence[str], host: str, flags: Sequence[str], environ: Mapping[str, str]) -> list[Port]:
    """Where Prometheus would scrape the servers `names` of `service`, all of which get these flags and variables; none when metrics are off.

    Also none where a flag or variable cannot be used: the service says so itself, and at once.
    """
    settings = describe(_Scraped, SettingsGroup, service)
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    for setting in settings:
        if not setting.is_bool:
            parser.add_argument(setting.flag, dest=setting.path[1])
    try:
        given = vars(parser.parse_known_args(list(flags))[0])
    except argparse.ArgumentError:
        return []
    values = {path[1]: value for path, value in read_environment(settings, environ, {}).items()}
    values |= {name: text.split(",") if name == "exporter" else text for name, text in given.items() if text is not None}
    try:
        metrics = MetricsSettings.model_validate({"port": METRICS_PORTS[service]} | values)
    except ValidationError:
        return []
    return [Port(f"{name}'s {port.flag}", port.host, port.number) for name in names for port in metrics.ports(host)]


def check_ports(ports: Sequence[Port]) -> None:
    """Raises UsageError for two that are one, and for one that is taken."""
    try:
        check_equal(ports)
    except ValueError as error:
        raise UsageError(f"{error}{_hint(str(error))}") from None
    for flag, host, number in ports:
        try:
            socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            problem = f"cannot listen on {join_address(host, number)}: {error.strerror or error}"
            raise UsageError(f"{flag}={number}: {problem}; choose another, or 0{_hint(flag)}") from error


def _hint(text: str) -> str:
    return _HINT if "--metrics-port" in text else ""
