// Stores into memory that another process of this host mapped.
#pragma once

#include <cstddef>

namespace baton {

void store_bytes(char *destination, const char *source, size_t num_bytes);

// Everything stored before is visible to the other process before everything stored after.
void store_fence();

} // namespace baton
