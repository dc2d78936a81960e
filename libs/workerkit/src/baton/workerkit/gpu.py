"""Memory, utilisation and energy of a server's GPUs, asked of NVIDIA's management library when somebody collects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from baton.servicekit import Metrics, get_logger

log = get_logger(__name__)

_MISSING = "nvidia-ml-py is not installed: pip install baton-workerkit[gpu]"


class GpuMetrics:
    """Observes the GPUs of `devices` ("0", "1"; as CUDA numbers them), or says once in the log why it cannot."""

    def __init__(self, metrics: Metrics, devices: Sequence[str]) -> None:
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        if not metrics.enabled or not any(devices):
            return
        try:
            self._open([device for device in devices if device])
        except Exception as error:  # whatever the driver says: a server without these metrics serves
            log.warning("no GPU metrics", reason=_MISSING if isinstance(error, ImportError) else str(error))
            return
        metrics.observe("baton.gpu.memory.used", lambda: self._each(lambda handle: self._library.nvmlDeviceGetMemoryInfo(handle).used))
        metrics.observe("baton.gpu.memory.limit", lambda: self._each(lambda handle: self._library.nvmlDeviceGetMemoryInfo(handle).total))
        metrics.observe("baton.gpu.utilization", lambda: self._each(lambda handle: self._library.nvmlDeviceGetUtilizationRates(handle).gpu / 100))
        metrics.observe("baton.gpu.energy", lambda: self._each(lambda handle: self._library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3))

    def _open(self, devices: Sequence[str]) -> None:
        import pynvml  # the extra `gpu`
        import torch

        pynvml.nvmlInit()
        for device in devices:
            # CUDA and the driver may number the same GPUs differently.
            uuid = torch.cuda.get_device_properties(int(device)).uuid
            self._handles[device] = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self._library = pynvml

    def _each(self, ask: Callable[[Any], float]) -> list[tuple[float, dict[str, str]]]:
        """A question that this GPU does not answer (energy, on old ones) is left out."""
        values = []
        for device, handle in self._handles.items():
            try:
                values.append((float(ask(handle)), {"gpu": device}))
            except self._library.NVMLError:
                continue
        return values
