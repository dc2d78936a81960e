"""Where something was measured."""

import os
import platform
import subprocess
from importlib.metadata import distributions
from pathlib import Path

from baton.bench.decide.record import Machine

#: Packages whose versions decide what was measured; every baton room besides.
PACKAGES = ("grpcio", "numpy", "tokenizers", "torch", "triton", "libucx-cu12", "libucx-cu13")


def describe_machine(*, with_gpus: bool) -> Machine:
    """Asks the driver for GPUs only if they are used."""
    versions = {name: item.version for item in distributions() if (name := (item.name or "").lower()) in PACKAGES or name.startswith("baton-")}
    return Machine(
        cpu=_cpu(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        gpus=_gpus() if with_gpus else (),
        versions=dict(sorted(versions.items())),
        load_average=round(os.getloadavg()[0], 2),
    )


def _cpu() -> str:
    file = Path("/proc/cpuinfo")
    if file.is_file():
        fields = dict(line.split(":", 1) for line in file.read_text().split("\n\n", maxsplit=1)[0].splitlines() if ":" in line)
        named = {name.strip(): value.strip() for name, value in fields.items()}
        return f"{named.get('model name', platform.machine())} (family {named.get('cpu family', '?')}, model {named.get('model', '?')})"
    return platform.processor() or platform.machine()


def _gpus() -> tuple[str, ...]:
    command = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return (f"unknown: {error}",)
    return tuple(found.stdout.strip().splitlines())
