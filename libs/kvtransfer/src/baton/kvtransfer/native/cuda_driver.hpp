// The functions of the CUDA driver that are called here, from libcuda.so.1 opened at the first use. Their types are spelled out: no CUDA headers are needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

using CudaResult = int;
constexpr CudaResult CUDA_DONE = 0, CUDA_NOT_READY = 600;

struct CudaIpcHandle {
    char bytes[64];
};

struct CudaDriver {
    CudaResult (*cuInit)(unsigned);
    CudaResult (*cuDeviceGet)(int *, int);
    CudaResult (*cuDevicePrimaryCtxRetain)(void **, int);
    CudaResult (*cuCtxSetCurrent)(void *);
    CudaResult (*cuGetErrorName)(CudaResult, const char **);
    CudaResult (*cuMemcpyHtoD_v2)(uint64_t, const void *, size_t);
    CudaResult (*cuMemcpyHtoDAsync_v2)(uint64_t, const void *, size_t, void *stream);
    CudaResult (*cuMemcpyDtoDAsync_v2)(uint64_t, uint64_t, size_t, void *stream);
    CudaResult (*cuMemAlloc_v2)(uint64_t *, size_t);
    CudaResult (*cuMemFree_v2)(uint64_t);
    CudaResult (*cuMemHostAlloc)(void **, size_t, unsigned);
    CudaResult (*cuMemFreeHost)(void *);
    CudaResult (*cuMemGetAddressRange_v2)(uint64_t *base, size_t *, uint64_t);
    CudaResult (*cuIpcGetMemHandle)(CudaIpcHandle *, uint64_t);
    CudaResult (*cuIpcOpenMemHandle_v2)(uint64_t *, CudaIpcHandle, unsigned);
    CudaResult (*cuIpcCloseMemHandle)(uint64_t);
    CudaResult (*cuStreamCreate)(void **, unsigned);
    CudaResult (*cuStreamSynchronize)(void *);
    CudaResult (*cuStreamDestroy_v2)(void *);
    CudaResult (*cuEventCreate)(void **, unsigned);
    CudaResult (*cuEventRecord)(void *, void *stream);
    CudaResult (*cuEventQuery)(void *);
    CudaResult (*cuEventDestroy_v2)(void *);
    CudaResult (*cuModuleLoadData)(void **, const void *);
    CudaResult (*cuModuleUnload)(void *);
    CudaResult (*cuModuleGetFunction)(void **, void *module, const char *);
    CudaResult (*cuLaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *stream, void **parameters, void **extra);

    // Throws Failure with the driver's name for `result`.
    void require(const char *function, CudaResult result) const;
};

// Opened and initialised. Throws Failure without a usable driver.
const CudaDriver &cuda_driver();

} // namespace baton
