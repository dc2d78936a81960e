#include "copy.hpp"

#include <atomic>
#include <cstring>

namespace baton {

void store_bytes(char *destination, const char *source, size_t num_bytes) { std::memcpy(destination, source, num_bytes); }

void store_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

} // namespace baton
