// Waking another process through a word of shared memory (futex): no socket, no polling, and a stopped receiver holds nobody up.
#pragma once

#include "doorbell.hpp"

#include <cstdint>

namespace baton {

void ring(Bell &bell);

// Sleeps while the count is still `seen`, at most `timeout_us`.
void wait_for_ring(Bell &bell, uint32_t seen, int64_t timeout_us);

} // namespace baton
