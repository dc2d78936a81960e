"""Energy of GPUs in joules, by the counter that each of them keeps, and whose it was: the roles of the servers that share the work."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.bench.errors import EnergyError
from baton.bench.numbers import plain

T = TypeVar("T")
UNUSED = "unused"


class EnergyCounter(Protocol):
    """What a GPU has used since its driver was loaded. `devices`: those that can be asked, "cuda:0" as CUDA numbers them."""

    @property
    def devices(self) -> tuple[str, ...]: ...

    def read_mj(self, device: str) -> int:
        """Millijoules. Takes up to milliseconds. Raises EnergyError with the device and the driver's own words."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class DeviceEnergy:
    """What one GPU used in `seconds`. `roles`: of the servers on it that took part, sorted, each once; empty if none did."""

    device: str
    roles: tuple[str, ...]
    joules: float
    seconds: float

    @property
    def role(self) -> str:
        """What several roles on one GPU use cannot be told apart: it is given as shared."""
        if not self.roles:
            return UNUSED
        return self.roles[0] if len(self.roles) == 1 else f"{' and '.join(self.roles)} (shared)"


@dataclass(frozen=True)
class Energy:
    """Of one cell or repeat, or of several together. `missing`: why it could not be measured; `devices` is empty then."""

    devices: tuple[DeviceEnergy, ...] = ()
    missing: str = ""

    def joules_by_role(self) -> dict[str, float]:
        """Of GPUs that took part, in the order of the devices."""
        found: dict[str, float] = {}
        for one in self.devices:
            if one.roles:
                found[one.role] = found.get(one.role, 0.0) + one.joules
        return found

    @property
    def joules(self) -> float:
        """Of GPUs that took part."""
        return sum(self.joules_by_role().values())

    @property
    def unused_joules(self) -> float:
        return sum(one.joules for one in self.devices if not one.roles)


@dataclass(frozen=True)
class IdlePower:
    """Mean power of a GPU before any server was started."""

    device: str
    watts: float
    seconds: float


@dataclass(frozen=True)
class EnergySource:
    """Whether a run has energy: `missing` says why not. `idle`: of every GPU, measured once, before the servers."""

    missing: str = ""
    idle: tuple[IdlePower, ...] = ()


@dataclass(frozen=True)
class Reading:
    """`at_s`: by the meter's clock, in the middle of the question. `mj`: device -> millijoules."""

    at_s: Mapping[str, float]
    mj: Mapping[str, int]


class EnergyMeter:
    """Reads every GPU of a run. Owns `counter`: `close` when done."""

    def __init__(self, counter: EnergyCounter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._counter, self._clock = counter, clock

    def read(self) -> Reading:
        """Blocks for as long as the driver takes, up to milliseconds a GPU. Raises EnergyError."""
        at_s, mj = {}, {}
        for device in self._counter.devices:
            before_s = self._clock()
            mj[device] = self._counter.read_mj(device)
            at_s[device] = (before_s + self._clock()) / 2
        return Reading(at_s, mj)

    def idle_power(self, seconds: float, sleep: Callable[[float], None] = time.sleep) -> tuple[IdlePower, ...]:
        """Blocks for `seconds`. Raises EnergyError."""
        before = self.read()
        sleep(seconds)
        used = spent(before, self.read(), {})
        return tuple(IdlePower(one.device, round(one.joules / one.seconds, 2), round(one.seconds, 3)) for one in used)

    def close(self) -> None:
        self._counter.close()


def spent(before: Reading, after: Reading, roles: Mapping[str, Sequence[str]]) -> tuple[DeviceEnergy, ...]:
    """`roles`: device -> roles of the servers on it that took part. Raises EnergyError for a counter that ran backwards or stood still: a GPU that is
    on uses power, so that a zero is no measurement."""
    found = []
    for device, start_mj in before.mj.items():
        used_mj, seconds = after.mj[device] - start_mj, after.at_s[device] - before.at_s[device]
        if used_mj <= 0:
            how = "stood still" if used_mj == 0 else f"ran back by {-used_mj / 1000:.3f} J (was the driver loaded anew?)"
            raise EnergyError(f"{device}: the energy counter {how} within {seconds:.2f} s")
        found.append(DeviceEnergy(device, tuple(sorted(set(roles.get(device, ())))), used_mj / 1000, round(seconds, 3)))
    return tuple(found)


async def metered(meter: EnergyMeter | None, roles: Mapping[str, Sequence[str]], work: Awaitable[T]) -> tuple[T, Energy | None]:
    """Awaits `work`, read before and after from a thread. None without a meter; what cannot be read is an `Energy` that says why."""
    if meter is None:
        return await work, None
    before, why = await _tried(meter)
    result = await work
    after, why_after = await _tried(meter)
    if before is None or after is None:
        return result, Energy(missing=why or why_after)
    try:
        return result, Energy(spent(before, after, roles))
    except EnergyError as error:
        return result, Energy(missing=str(error))


async def _tried(meter: EnergyMeter) -> tuple[Reading | None, str]:
    try:
        return await asyncio.to_thread(meter.read), ""
    except EnergyError as error:
        return None, str(error)


def total(parts: Sequence[Energy]) -> Energy | None:
    """Device by device and role by role; None of nothing. One part that is missing makes the whole missing: tokens are counted over all of them."""
    if not parts:
        return None
    if missing := next((part.missing for part in parts if part.missing), ""):
        return Energy(missing=missing)
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for one in (one for part in parts for one in part.devices):
        found = sums.setdefault((one.device, one.roles), [0.0, 0.0])
        found[0] += one.joules
        found[1] += one.seconds
    return Energy(tuple(DeviceEnergy(device, roles, joules, seconds) for (device, roles), (joules, seconds) in sums.items()))


def idle_words(source: EnergySource) -> str:
    """One line on where the joules are from, or why there are none."""
    if source.missing:
        return f"not available: {source.missing}"
    watts = ", ".join(f"{one.device} {one.watts:.0f} W" for one in source.idle)
    return f"the GPUs' own counters (NVML), read before the first request and after the last; idle, before the servers started: {watts}"


def token_words(energy: Energy, num_tokens: int) -> str:
    """ "0.93 J (prefill 0.31, decode 0.62)": of GPUs that took part, over the output tokens; the prompts' work is in it. Needs tokens."""
    parts = ", ".join(f"{role} {plain(joules / num_tokens)}" for role, joules in energy.joules_by_role().items())
    return f"{plain(energy.joules / num_tokens)} J ({parts})"
