"""Whether the machine was ours alone before anything was started. Pure."""

from baton.bench.decide.record import Machine

#: With more runnable tasks than this part of the cores the machine was busy with other work.
BUSY_SHARE = 0.25


def busy_share(machine: Machine) -> float:
    """Runnable tasks of the minute before, over the cores that may be used."""
    return machine.load_average / max(machine.num_cores, 1)


def is_busy(machine: Machine) -> bool:
    return busy_share(machine) > BUSY_SHARE


def load_words(machine: Machine) -> str:
    cores = "core" if machine.num_cores == 1 else "cores"
    return f"load average {machine.load_average:.1f} on {machine.num_cores} {cores}, {100 * busy_share(machine):.0f} % of them"
