"""One process's metrics: what services record by and observe through, over OpenTelemetry's SDK."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from prometheus_client import CollectorRegistry

from baton.servicekit.groups import ListenSettings, MetricsSettings
from baton.servicekit.metrics.buckets import Buckets
from baton.servicekit.metrics.instruments import BY_NAME, INSTRUMENTS, ORIGINS, OTHER, Instrument
from baton.servicekit.metrics.listener import Context, MetricsListener
from baton.servicekit.metrics.readers import Counted, CountedSource, readers
from baton.servicekit.server import join_address
from baton.servicekit.tracing import resource_of

#: How long a collector that does not answer may keep a service from ending.
SHUTDOWN_MS = 5_000

#: Each with its labels.
Values = Iterable[tuple[float, Mapping[str, str]]]

#: Values as they are now. Called on a thread of the exporter's: read snapshots only, and change nothing.
Observation = Callable[[], Values]


class FailedRoom(NamedTuple):
    """How rooms are counted that failed. stage: "BOOTSTRAPPING", ... peer: as in the table. is_split: a hand-over between two servers was meant."""

    origin: str
    stage: str
    cause: str
    peer: str
    is_split: bool


class Recorder:
    """One counter or histogram of the table. `record` may be called from any thread, once a room or a request; not for every token."""

    def __init__(self, instrument: Instrument, role: str, record: Callable[[float, dict[str, str]], None] | None) -> None:
        self._instrument = instrument
        self._role = role
        self._record = record

    def record(self, value: float, **labels: str) -> None:
        """A counter grows by `value`, a histogram takes it. Labels that the table does not allow become "other"; all of its labels must be given."""
        if self._record is not None:
            self._record(value, labels_of(self._instrument, self._role, labels))


class Metrics:
    """Makes the table's instruments. All is off, and free, where the settings name no exporter.

    role: gateway, prefill, decode or plain; a label of everything.
    """

    def __init__(self, exporters: Iterable[str], *, service: str, role: str, instance_id: str) -> None:
        """Raises SettingsError for an OTLP protocol other than grpc."""
        self.role = role
        self._counted: list[Counted] = []
        self._registry = CollectorRegistry()
        self._provider: MeterProvider | None = None
        self._listener: MetricsListener | None = None
        self.is_scraped = "prometheus" in exporters
        exporters = [name for name in exporters if name != "none"]
        if not exporters:
            return
        source = CountedSource(self._counted)
        self._provider = MeterProvider(
            readers(exporters, source, self._registry), resource_of(service, instance_id), shutdown_on_exit=False, views=_views()
        )

    @property
    def enabled(self) -> bool:
        return self._provider is not None

    def recorder(self, name: str) -> Recorder:
        """Of a counter or histogram of the table."""
        instrument = self._own(name)
        if self._provider is None:
            return Recorder(instrument, self.role, None)
        meter = self._provider.get_meter("baton")
        if instrument.kind == "counter":
            counter = meter.create_counter(instrument.name, instrument.unit, instrument.about)
            return Recorder(instrument, self.role, counter.add)
        histogram = meter.create_histogram(instrument.name, instrument.unit, instrument.about)
        return Recorder(instrument, self.role, histogram.record)

    def observe(self, name: str, observation: Observation) -> None:
        """A counter or gauge of the table whose values are looked up when somebody collects them."""
        instrument = self._own(name)
        if self._provider is None:
            return

        def look(_: api.CallbackOptions) -> list[api.Observation]:
            return [api.Observation(value, labels_of(instrument, self.role, labels)) for value, labels in _joined(instrument, observation())]

        meter = self._provider.get_meter("baton")
        create = meter.create_observable_counter if instrument.kind == "counter" else meter.create_observable_gauge
        create(instrument.name, [look], instrument.unit, instrument.about)

    def observe_one(self, name: str, value: Callable[[], float]) -> None:
        """The same for one without labels."""
        self.observe(name, lambda: [(value(), {})])

    def buckets(self, name: str, **labels: str) -> Buckets | None:
        """Of a histogram of the table with these labels, for what happens too often for a Recorder; None where nobody would read it."""
        instrument = self._own(name)
        if self._provider is None:
            return None
        buckets = Buckets(instrument.bounds)
        self._counted.append((instrument, labels_of(instrument, self.role, labels), buckets))
        return buckets

    def observe_failures(self, failures: Counter[FailedRoom]) -> None:
        """The counters of failed rooms, and of failed bootstraps and transfers, from one count of them all."""
        self.observe("baton.rooms.failed", lambda: _failures(failures, "stage"))
        if self.role != "plain":
            self.observe("baton.bootstrap.failed", lambda: _failures(failures, "peer", "BOOTSTRAPPING"))
            self.observe("baton.transfer.failed", lambda: _failures(failures, "peer", "WAITING", "TRANSFERRING"))

    def listen(self, settings: MetricsSettings, listen: ListenSettings, context: Context, *, port_offset: int = 0) -> dict[str, str]:
        """Opens the port that Prometheus scrapes, if it shall; returns it as {"metrics": "host:port"} or nothing.

        listen: where the service listens. port_offset: added to the port, where several processes of a service need one each.

        Raises AddressUnavailableError.
        """
        if not self.is_scraped:
            return {}
        host = settings.host or listen.host
        port = settings.port + port_offset if settings.port else 0
        self._listener = MetricsListener(host, port, self._registry, context if settings.tls else lambda: None)
        return {"metrics": join_address(listen.model_copy(update={"host": host}).advertised_host(), self._listener.port)}

    def shutdown(self) -> None:
        """Pushes what is left and closes the port. Idempotent. Blocks up to the exporter's timeout: call it off the event loop."""
        provider, self._provider = self._provider, None
        if self._listener is not None:
            self._listener.close()
        if provider is not None:
            provider.shutdown(SHUTDOWN_MS)

    def _own(self, name: str) -> Instrument:
        instrument = BY_NAME[name]
        if self.role not in instrument.roles:
            raise ValueError(f"{name} is no metric of role {self.role}, but of {', '.join(instrument.roles)}: see the table of instruments")
        return instrument


def configure_metrics(settings: MetricsSettings, *, service: str, instance_id: str, role: str | None = None) -> Metrics:
    """As the settings say. role: the service's name when not given. Raises SettingsError."""
    return Metrics(settings.exporter, service=service, role=role or service, instance_id=instance_id)


def labels_of(instrument: Instrument, role: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Of one value, in the table's order. Raises ValueError when they are not the table's."""
    if labels.keys() != instrument.labels.keys():
        raise ValueError(f"{instrument.name} has the labels {sorted(instrument.labels)}, not {sorted(labels)}")
    return {"role": role} | {label: instrument.value_of(label, labels[label]) for label in instrument.labels}


def _joined(instrument: Instrument, values: Values) -> Values:
    """Several values that become "other" are one."""
    if not instrument.labels:
        return values
    sums: dict[tuple[str, ...], float] = {}
    for value, labels in values:
        key = tuple(instrument.value_of(label, labels[label]) for label in instrument.labels)
        sums[key] = sums.get(key, 0) + value
    return [(value, dict(zip(instrument.labels, key, strict=True))) for key, value in sums.items()]


def _failures(failures: Counter[FailedRoom], by: str, *stages: str) -> Values:
    """With a 0 for every origin: a series that begins with its first failure would hide it from a rate."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for room, count in list(failures.items()):
        if not stages or (room.is_split and room.stage in stages):
            sums[room.origin, room.cause, room.stage.lower() if by == "stage" else room.peer] += count
    zeros = [(0.0, {"origin": origin, "cause": OTHER, by: OTHER}) for origin in ORIGINS]
    return [*zeros, *((float(count), {"origin": origin, "cause": cause, by: last}) for (origin, cause, last), count in sums.items())]


def _views() -> list[View]:
    return [
        View(instrument_name=instrument.name, aggregation=ExplicitBucketHistogramAggregation(instrument.bounds))
        for instrument in INSTRUMENTS
        if instrument.kind == "histogram"
    ]
