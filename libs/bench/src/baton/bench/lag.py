"""The generator's own lag: did it send when it should have, and did it look at its sockets in time?"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.percentiles import Percentiles

#: A lag below this is the resolution of an event loop's timers.
FLOOR_MS = 2.0
#: Above this part of what is being measured a lag is no longer noise.
PART = 0.05


@dataclass(frozen=True)
class LagReport:
    """`send_ms`: sending against schedule, one a request. `loop_ms`: how late a timer of 10 ms fired: by so much an arrival may be stamped too late.
    `verdicts`: why the figures are the generator's and not only the server's; empty for a run to be trusted."""

    send_ms: Percentiles | None
    loop_ms: Percentiles | None
    verdicts: tuple[str, ...]

    @property
    def matters(self) -> bool:
        return bool(self.verdicts)


def judge_lag(send_s: Sequence[float], loop_s: Sequence[float], ttft_ms: Percentiles | None, itl_ms: Percentiles | None) -> LagReport:
    """Late sending is held against the median TTFT, late stamps against the p99 of the gaps; each may be 5 % of it, or 2 ms."""
    send, loop = Percentiles.of(send_s, 1000), Percentiles.of(loop_s, 1000)
    verdicts = []
    send_allowed, loop_allowed = _allowed(ttft_ms.p50 if ttft_ms else 0.0), _allowed(itl_ms.p99 if itl_ms else 0.0)
    if send is not None and send.p99 > send_allowed:
        verdicts.append(
            f"requests were sent late (p99 {send.p99:.1f} ms, allowed {send_allowed:.1f} ms): send fewer, or give the generator a machine of its own"
        )
    if loop is not None and loop.p99 > loop_allowed:
        verdicts.append(f"arrivals were stamped late (timers p99 {loop.p99:.1f} ms late, allowed {loop_allowed:.1f} ms): ITL may be too high by that")
    return LagReport(send, loop, tuple(verdicts))


def _allowed(measured_ms: float) -> float:
    return max(FLOOR_MS, PART * measured_ms)
