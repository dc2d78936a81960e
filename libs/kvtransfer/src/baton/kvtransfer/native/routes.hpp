// UCX 1.22 reads the kernel's routing table once in a process's life, when it first connects, and then holds everybody unreachable through a network
// device that came later. So its question is answered here, as the kernel sees it now.
#pragma once

namespace baton {

// Before libuct is loaded: its references to the function below are bound to this one then, as the dynamic linker does with global symbols. Without
// effect where another package has loaded UCX already, or for a UCX that has no such function.
void offer_routes();
// libucs's own, once it is loaded; null: it has none.
void know_routes_of(void *library);

} // namespace baton
