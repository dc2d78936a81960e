#include "bell.hpp"

#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace baton {

void ring(Bell &bell) {
    bell.count.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&bell.count), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void wait_for_ring(Bell &bell, uint32_t seen, int64_t timeout_us) {
    struct timespec timeout{timeout_us / 1000000, (timeout_us % 1000000) * 1000};
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&bell.count), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

} // namespace baton
