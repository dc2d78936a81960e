// The few functions of the CUDA driver that the core needs, from libcuda.so.1 opened at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

// Makes `device`'s primary context current in the calling thread (retained once per process). Throws Failure without a usable driver.
void cuda_bind(int device);

// Copies host bytes into device memory and waits for it.
void cuda_store(uint64_t destination, const char *source, size_t num_bytes);

// Whether a CUDA event has fired. Throws Failure when the driver reports an error.
bool cuda_event_fired(uint64_t event);

} // namespace baton
