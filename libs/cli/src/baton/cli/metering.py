"""The energy of the GPUs that a command measures on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.bench.energy import EnergyMeter, EnergySource
from baton.bench.nvml import open_meter
from baton.cli.decide_pool import Device
from baton.cli.model.progress import ConsoleReporter


@contextmanager
def metering(devices: Sequence[Device], reporter: ConsoleReporter) -> Iterator[tuple[EnergyMeter | None, EnergySource]]:
    """A meter of the GPUs among `devices`, or none and why. To be entered before any server is started: seconds of idle power are measured first."""
    gpus = [device.name for device in devices if device.is_gpu]
    if not gpus:
        yield open_meter(gpus)
        return
    with reporter.step("idle power of the GPUs, before any server is started", 1) as step:
        meter, source = open_meter(gpus)
        step(1)
    if source.missing:
        reporter.note(f"energy is not available: {source.missing}")
    try:
        yield meter, source
    finally:
        if meter is not None:
            meter.close()
