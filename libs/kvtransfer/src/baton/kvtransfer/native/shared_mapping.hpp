// What of this process's memory other processes can map too, as the kernel tells it.
#pragma once

#include <cstdint>
#include <string>

namespace baton {

struct SharedMapping {
    std::string kind; // "sysv" or "posix"; empty: no shared memory is mapped at the address
    uint64_t end = 0; // of what is mapped there without a gap
};

SharedMapping find_shared(uint64_t address);

} // namespace baton
