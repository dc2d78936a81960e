// The clock of Python's time.monotonic().
#pragma once

#include <cstdint>
#include <ctime>

namespace baton {

inline int64_t now_ns() {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}

} // namespace baton
