#include "shared_mapping.hpp"

#include <cinttypes>
#include <cstdio>
#include <fstream>

namespace baton {

SharedMapping find_shared(uint64_t address) {
    std::ifstream maps("/proc/self/maps");
    SharedMapping found;
    for (std::string line; std::getline(maps, line);) {
        uint64_t first = 0, last = 0;
        char access[5] = "";
        if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s", &first, &last, access) != 3 || last <= address) {
            continue;
        }
        const std::string kind = access[3] != 's' || access[1] != 'w' ? "" : line.find("/SYSV") != std::string::npos ? "sysv" : "posix";
        if (found.kind.empty() ? first > address || kind.empty() : first != found.end || kind != found.kind) {
            break;
        }
        found = {kind, last};
    }
    return found;
}

} // namespace baton
