"""Device memory for the GPU benchmark, through the CUDA driver itself: no torch."""

from __future__ import annotations

import ctypes

import numpy as np


class CudaMemory:
    """`num_bytes` on `device`; its primary context is current in the calling thread from here on."""

    def __init__(self, device: int, num_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        handle, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.address = address.value
        self.num_bytes = num_bytes

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} failed with CUDA error {result}")

    def write(self, data: np.ndarray) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes))

    def read(self) -> np.ndarray:
        data = np.empty(self.num_bytes, dtype=np.uint8)
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(self.address), ctypes.c_size_t(self.num_bytes))
        return data
