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

// Keeps the processor, but not the memory's and the other hyperthread's: for times that are shorter than a sleep can be.
inline void pause_until(int64_t end_ns) {
    while (now_ns() < end_ns) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
}

} // namespace baton
