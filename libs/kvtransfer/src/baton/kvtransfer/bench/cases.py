"""What is measured: one span, written again and again between two processes, as `ucx_perftest -t ucp_put_bw` does."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
WARM_PUTS = 10

#: Ours over ucx_perftest, by the smallest span it is asked of.
_TARGETS = ((MIB, 0.95), (64 * KIB, 0.8))


@dataclass(frozen=True)
class Case:
    transport: str
    num_bytes: int
    count: int

    @property
    def target(self) -> float | None:
        return next((ratio for smallest, ratio in _TARGETS if self.num_bytes >= smallest), None)


def cases(transport: str, total_bytes: int) -> list[Case]:
    return [Case(transport, size, max(20, min(4000, total_bytes // size))) for size in SIZES]
