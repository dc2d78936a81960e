"""The energy counters of NVIDIA's GPUs, by NVML; which GPU is which, by CUDA itself."""

import ctypes
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from baton.bench.energy import EnergyMeter, EnergySource
from baton.bench.errors import EnergyError

#: A counter moves in steps of up to about a tenth of a second: the mean over this long is good to a few in a hundred.
IDLE_S = 3.0


class NvmlCounter:
    """An EnergyCounter. `library`: pynvml; `uuids`: device -> UUID as NVML writes it. `close` gives NVML back."""

    def __init__(self, library: Any, uuids: Mapping[str, str]) -> None:
        """Raises EnergyError for a GPU that NVML does not know or that keeps no counter."""
        self._library = library
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise EnergyError(f"NVML: {error}") from error
        self._handles = {}
        try:
            for device, name in uuids.items():
                self._handles[device] = self._asked(device, name, partial(library.nvmlDeviceGetHandleByUUID, name))
                self.read_mj(device)
        except EnergyError:
            self.close()
            raise

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self._handles)

    def read_mj(self, device: str) -> int:
        ask = partial(self._library.nvmlDeviceGetTotalEnergyConsumption, self._handles[device])
        return int(self._asked(device, "energy counter", ask))

    def close(self) -> None:
        self._library.nvmlShutdown()

    def _asked(self, device: str, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._library.NVMLError as error:
            raise EnergyError(f"{device}, {what}: NVML says {error}") from error


def open_counter(devices: Sequence[str]) -> NvmlCounter:
    """Of these GPUs ("cuda:0", as CUDA numbers them for this process; one named twice is one). Raises EnergyError that says what is missing."""
    wanted = list(dict.fromkeys(devices))
    if not wanted:
        raise EnergyError("no GPU among the devices")
    try:
        import pynvml  # the extra `energy`
    except ImportError as error:
        raise EnergyError("nvidia-ml-py is not installed: pip install 'baton-bench[energy]'") from error
    return NvmlCounter(pynvml, cuda_uuids(wanted, _library("libcuda.so.1")))


def open_meter(devices: Sequence[str], idle_s: float = IDLE_S) -> tuple[EnergyMeter | None, EnergySource]:
    """A meter and the power of the GPUs while nothing runs yet; or none and why. Blocks for `idle_s` where there are GPUs. Close the meter."""
    try:
        meter = EnergyMeter(open_counter(devices))
    except EnergyError as error:
        return None, EnergySource(str(error))
    try:
        return meter, EnergySource(idle=meter.idle_power(idle_s))
    except EnergyError as error:
        meter.close()
        return None, EnergySource(str(error))


def cuda_uuids(devices: Sequence[str], cuda: Any) -> dict[str, str]:
    """device -> "GPU-..." . CUDA is asked and not the driver's list: CUDA_VISIBLE_DEVICES (numbers or UUIDs) and CUDA_DEVICE_ORDER decide which GPU
    is cuda:0 for the servers, and they decide it here. No context is made, no memory taken. Raises EnergyError."""
    _checked(cuda, "cuInit", 0)
    num = ctypes.c_int()
    _checked(cuda, "cuDeviceGetCount", ctypes.byref(num))
    found = {}
    for device in devices:
        ordinal = int(device.removeprefix("cuda:"))
        if ordinal >= num.value:
            raise EnergyError(f"{device} is not here: CUDA shows {num.value} GPUs to this process (see CUDA_VISIBLE_DEVICES)")
        handle, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        _checked(cuda, "cuDeviceGet", ctypes.byref(handle), ordinal)
        _checked(cuda, "cuDeviceGetUuid_v2", ctypes.byref(raw), handle)
        found[device] = f"GPU-{uuid.UUID(bytes=bytes(raw))}"
    return found


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise EnergyError(f"no NVIDIA driver here ({error})") from error


def _checked(cuda: Any, function: str, *arguments: object) -> None:
    code = getattr(cuda, function)(*arguments)
    if code != 0:
        raise EnergyError(f"CUDA's {function} failed with code {code}")
