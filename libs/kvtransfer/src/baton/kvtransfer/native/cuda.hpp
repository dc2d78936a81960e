// CUDA memory: the context of a thread, events, and pools that another process maps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace baton {

// Makes `device`'s primary context current in the calling thread (retained once per process). Throws Failure without a usable driver.
void cuda_bind(int device);

uint64_t cuda_allocate(int device, size_t num_bytes);
void cuda_free(int device, uint64_t address);

// Copies host bytes into device memory and waits for it.
void cuda_store(uint64_t destination, const char *source, size_t num_bytes);

// Whether a CUDA event has fired. Throws Failure when the driver reports an error.
bool cuda_event_fired(uint64_t event);

// What another process of this host needs to map the memory at `address`. Throws Failure where it cannot be shared (memory of the virtual memory API,
// as torch's expandable segments are).
std::string cuda_export(uint64_t address);

// Another process's memory, mapped into the current context.
class CudaMapping {
public:
    explicit CudaMapping(const std::string &exported);
    ~CudaMapping();
    CudaMapping(const CudaMapping &) = delete;
    CudaMapping &operator=(const CudaMapping &) = delete;

    uint64_t address() const { return base_ + offset_; }

private:
    uint64_t base_ = 0;
    uint64_t offset_ = 0;
};

} // namespace baton
