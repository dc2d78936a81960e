#include "cuda.hpp"

#include "cuda_driver.hpp"
#include "failure.hpp"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>

namespace baton {

namespace {

constexpr unsigned IPC_LAZY_PEER_ACCESS = 1;

struct Exported {
    CudaIpcHandle handle;
    uint64_t offset; // of the address in its allocation
};

template <typename Function> void resolve(void *library, const char *name, Function &target) {
    target = reinterpret_cast<Function>(dlsym(library, name));
    if (!target) {
        throw Failure(name, -1, "libcuda.so.1 lacks this function: the driver is too old");
    }
}

CudaDriver open_driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *words = dlerror();
        throw Failure("dlopen(libcuda.so.1)", -1, words ? words : "unknown");
    }
    CudaDriver driver{};
#define BATON_RESOLVE(name) resolve(library, #name, driver.name)
    BATON_RESOLVE(cuInit);
    BATON_RESOLVE(cuDeviceGet);
    BATON_RESOLVE(cuDevicePrimaryCtxRetain);
    BATON_RESOLVE(cuCtxSetCurrent);
    BATON_RESOLVE(cuGetErrorName);
    BATON_RESOLVE(cuMemcpyHtoD_v2);
    BATON_RESOLVE(cuMemcpyHtoDAsync_v2);
    BATON_RESOLVE(cuMemcpyDtoDAsync_v2);
    BATON_RESOLVE(cuMemAlloc_v2);
    BATON_RESOLVE(cuMemFree_v2);
    BATON_RESOLVE(cuMemHostAlloc);
    BATON_RESOLVE(cuMemFreeHost);
    BATON_RESOLVE(cuMemGetAddressRange_v2);
    BATON_RESOLVE(cuIpcGetMemHandle);
    BATON_RESOLVE(cuIpcOpenMemHandle_v2);
    BATON_RESOLVE(cuIpcCloseMemHandle);
    BATON_RESOLVE(cuStreamCreate);
    BATON_RESOLVE(cuStreamSynchronize);
    BATON_RESOLVE(cuStreamDestroy_v2);
    BATON_RESOLVE(cuEventCreate);
    BATON_RESOLVE(cuEventRecord);
    BATON_RESOLVE(cuEventQuery);
    BATON_RESOLVE(cuEventDestroy_v2);
    BATON_RESOLVE(cuModuleLoadData);
    BATON_RESOLVE(cuModuleUnload);
    BATON_RESOLVE(cuModuleGetFunction);
    BATON_RESOLVE(cuLaunchKernel);
#undef BATON_RESOLVE
    driver.require("cuInit", driver.cuInit(0));
    return driver;
}

void *primary_context(int device) {
    static std::mutex mutex;
    static std::map<int, void *> contexts; // retained for the life of the process, like everybody's primary context
    std::lock_guard<std::mutex> lock(mutex);
    auto found = contexts.find(device);
    if (found != contexts.end()) {
        return found->second;
    }
    const CudaDriver &driver = cuda_driver();
    int handle = 0;
    driver.require("cuDeviceGet", driver.cuDeviceGet(&handle, device));
    void *context = nullptr;
    driver.require("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(&context, handle));
    return contexts[device] = context;
}

} // namespace

void CudaDriver::require(const char *function, CudaResult result) const {
    if (result != CUDA_DONE) {
        const char *name = nullptr;
        cuGetErrorName(result, &name);
        throw Failure(function, -result, name ? name : "unknown CUDA error");
    }
}

const CudaDriver &cuda_driver() {
    static const CudaDriver driver = open_driver();
    return driver;
}

void cuda_bind(int device) { cuda_driver().require("cuCtxSetCurrent", cuda_driver().cuCtxSetCurrent(primary_context(device))); }

uint64_t cuda_allocate(int device, size_t num_bytes) {
    cuda_bind(device);
    uint64_t address = 0;
    cuda_driver().require("cuMemAlloc", cuda_driver().cuMemAlloc_v2(&address, num_bytes));
    return address;
}

void cuda_free(int device, uint64_t address) {
    cuda_bind(device);
    cuda_driver().cuMemFree_v2(address);
}

void cuda_store(uint64_t destination, const char *source, size_t num_bytes) {
    cuda_driver().require("cuMemcpyHtoD", cuda_driver().cuMemcpyHtoD_v2(destination, source, num_bytes));
}

bool cuda_event_fired(uint64_t event) {
    const CudaResult result = cuda_driver().cuEventQuery(reinterpret_cast<void *>(event));
    if (result == CUDA_NOT_READY) {
        return false;
    }
    cuda_driver().require("cuEventQuery", result);
    return true;
}

std::string cuda_export(uint64_t address) {
    const CudaDriver &driver = cuda_driver();
    Exported exported{};
    uint64_t base = 0;
    size_t length = 0;
    driver.require("cuMemGetAddressRange", driver.cuMemGetAddressRange_v2(&base, &length, address));
    driver.require("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(&exported.handle, base));
    exported.offset = address - base;
    return std::string(reinterpret_cast<const char *>(&exported), sizeof(exported));
}

CudaMapping::CudaMapping(const std::string &exported) {
    Exported copy{};
    if (exported.size() != sizeof(copy)) {
        throw Failure("cuIpcOpenMemHandle", -1, "the exported handle has a wrong size");
    }
    std::memcpy(&copy, exported.data(), sizeof(copy));
    offset_ = copy.offset;
    cuda_driver().require("cuIpcOpenMemHandle", cuda_driver().cuIpcOpenMemHandle_v2(&base_, copy.handle, IPC_LAZY_PEER_ACCESS));
}

CudaMapping::~CudaMapping() { cuda_driver().cuIpcCloseMemHandle(base_); }

} // namespace baton
