#include "cuda.hpp"

#include "failure.hpp"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace baton {

namespace {

using Result = int;
constexpr Result SUCCESS = 0;
constexpr Result NOT_READY = 600;

struct Driver {
    Result (*init)(unsigned) = nullptr;
    Result (*device_get)(int *, int) = nullptr;
    Result (*retain)(void **, int) = nullptr;
    Result (*set_current)(void *) = nullptr;
    Result (*event_query)(void *) = nullptr;
    Result (*copy_to_device)(uint64_t, const void *, size_t) = nullptr;
    Result (*error_name)(Result, const char **) = nullptr;

    Driver() {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            const char *words = dlerror();
            throw Failure("dlopen(libcuda.so.1)", -1, words ? words : "unknown");
        }
        resolve(library, "cuInit", init);
        resolve(library, "cuDeviceGet", device_get);
        resolve(library, "cuDevicePrimaryCtxRetain", retain);
        resolve(library, "cuCtxSetCurrent", set_current);
        resolve(library, "cuEventQuery", event_query);
        resolve(library, "cuMemcpyHtoD_v2", copy_to_device);
        resolve(library, "cuGetErrorName", error_name);
        require("cuInit", init(0));
    }

    template <typename Function> static void resolve(void *library, const char *name, Function &target) {
        target = reinterpret_cast<Function>(dlsym(library, name));
        if (!target) {
            throw Failure(name, -1, "libcuda.so.1 lacks this function: the driver is too old");
        }
    }

    void require(const char *function, Result result) const {
        if (result != SUCCESS) {
            const char *name = nullptr;
            error_name(result, &name);
            throw Failure(function, -result, name ? name : "unknown CUDA error");
        }
    }
};

const Driver &driver() {
    static const Driver instance;
    return instance;
}

void *primary_context(int device) {
    static std::mutex mutex;
    static std::map<int, void *> contexts; // retained for the life of the process, like everybody's primary context
    std::lock_guard<std::mutex> lock(mutex);
    auto found = contexts.find(device);
    if (found != contexts.end()) {
        return found->second;
    }
    int handle = 0;
    driver().require("cuDeviceGet", driver().device_get(&handle, device));
    void *context = nullptr;
    driver().require("cuDevicePrimaryCtxRetain", driver().retain(&context, handle));
    return contexts[device] = context;
}

} // namespace

void cuda_bind(int device) { driver().require("cuCtxSetCurrent", driver().set_current(primary_context(device))); }

void cuda_store(uint64_t destination, const char *source, size_t num_bytes) {
    driver().require("cuMemcpyHtoD", driver().copy_to_device(destination, source, num_bytes));
}

bool cuda_event_fired(uint64_t event) {
    Result result = driver().event_query(reinterpret_cast<void *>(event));
    if (result == NOT_READY) {
        return false;
    }
    driver().require("cuEventQuery", result);
    return true;
}

} // namespace baton
