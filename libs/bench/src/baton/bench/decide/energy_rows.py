"""Energy of a decide run, topology by topology and load by load. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.decide.record import Cell, DecideRecord
from baton.bench.energy import Energy, total
from baton.bench.numbers import plain

HEAD = ("topology", "requests/s", "cells", "output tokens", "J per output token", "of which, by role", "unused GPUs, J per token", "mean W")


@dataclass(frozen=True)
class EnergyRow:
    """All cells of one topology under one load whose counters were read. Joules are over output tokens; the prompts' work is in them."""

    topology: str
    rate_rps: float
    num_cells: int
    num_tokens: int
    energy: Energy

    @property
    def per_token(self) -> float:
        return self.energy.joules / self.num_tokens

    @property
    def values(self) -> tuple[str | int | float, ...]:
        """As HEAD names them."""
        by_role = ", ".join(f"{role} {plain(joules / self.num_tokens)}" for role, joules in self.energy.joules_by_role().items())
        watts = ", ".join(f"{one.device} {one.joules / one.seconds:.0f}" for one in self.energy.devices)
        unused = self.energy.unused_joules / self.num_tokens
        return (self.topology, self.rate_rps, self.num_cells, self.num_tokens, self.per_token, by_role, unused or "–", watts)


def energy_rows(record: DecideRecord) -> list[EnergyRow]:
    """Cells without an output token have no row."""
    rows = []
    for topology in record.topologies:
        cells = record.cells_of(topology.name)
        for rate in sorted({cell.rate_rps for cell in cells}):
            row = energy_row(topology.name, [cell for cell in cells if cell.rate_rps == rate])
            rows += [] if row is None else [row]
    return rows


def energy_row(topology: str, cells: Sequence[Cell]) -> EnergyRow | None:
    """Of cells under one load; None if no counter was read or no token came."""
    read = [cell for cell in cells if cell.energy is not None and not cell.energy.missing]
    energy, num_tokens = total([cell.energy for cell in read if cell.energy is not None]), sum(cell.tokens_reported for cell in read)
    return EnergyRow(topology, cells[0].rate_rps, len(read), num_tokens, energy) if energy is not None and num_tokens else None
