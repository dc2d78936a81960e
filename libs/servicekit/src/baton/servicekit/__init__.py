"""What every Baton service shares: settings, logs, traces, metrics, health, start and drain."""

from baton.servicekit.api_keys import ApiKey, ApiKeys, KeyLimits, KeyRole, new_key, read_api_keys, watch_api_keys
from baton.servicekit.errors import AddressUnavailableError, SecretFileError, ServicekitError, SettingsError, StartError, TlsError
from baton.servicekit.failed_traces import mark_failed
from baton.servicekit.groups import ListenSettings, LogSettings, MetricsSettings, TlsSettings, TraceSettings
from baton.servicekit.identity import new_instance_id
from baton.servicekit.lifecycle import Lifecycle, run
from baton.servicekit.logs import configure_logs, get_logger
from baton.servicekit.metrics import Buckets, FailedRoom, Metrics, configure_metrics
from baton.servicekit.ports import Port, check_ports
from baton.servicekit.secret_file import watch_secrets
from baton.servicekit.server import GrpcServer, join_address
from baton.servicekit.settings import ServiceSettings, SettingsGroup
from baton.servicekit.tls import Tls, TlsFiles, open_channel
from baton.servicekit.tracing import Tracing, configure_tracing, extract, extract_traceparent, inject, inject_traceparent
from baton.servicekit.watched import Watched

__all__ = [
    "AddressUnavailableError",
    "ApiKey",
    "ApiKeys",
    "Buckets",
    "FailedRoom",
    "GrpcServer",
    "KeyLimits",
    "KeyRole",
    "Lifecycle",
    "ListenSettings",
    "LogSettings",
    "Metrics",
    "MetricsSettings",
    "Port",
    "SecretFileError",
    "ServiceSettings",
    "ServicekitError",
    "SettingsError",
    "SettingsGroup",
    "StartError",
    "Tls",
    "TlsError",
    "TlsFiles",
    "TlsSettings",
    "TraceSettings",
    "Tracing",
    "Watched",
    "check_ports",
    "configure_logs",
    "configure_metrics",
    "configure_tracing",
    "extract",
    "extract_traceparent",
    "get_logger",
    "inject",
    "inject_traceparent",
    "join_address",
    "mark_failed",
    "new_instance_id",
    "new_key",
    "open_channel",
    "read_api_keys",
    "run",
    "watch_api_keys",
    "watch_secrets",
]
