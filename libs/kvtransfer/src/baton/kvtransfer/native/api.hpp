// The libucp that this process uses: opened once at run time, never linked to.
#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <vector>

// Every UCX function that is called here. A library that lacks one is refused by name.
#define BATON_UCP_FUNCTIONS(X)                                                                                                                        \
    X(ucp_am_send_nbx)                                                                                                                                \
    X(ucp_cleanup)                                                                                                                                    \
    X(ucp_config_modify)                                                                                                                              \
    X(ucp_config_read)                                                                                                                                \
    X(ucp_config_release)                                                                                                                             \
    X(ucp_ep_close_nbx)                                                                                                                               \
    X(ucp_ep_create)                                                                                                                                  \
    X(ucp_ep_flush_nbx)                                                                                                                               \
    X(ucp_ep_print_info)                                                                                                                              \
    X(ucp_ep_rkey_unpack)                                                                                                                             \
    X(ucp_get_nbx)                                                                                                                                    \
    X(ucp_get_version)                                                                                                                                \
    X(ucp_get_version_string)                                                                                                                         \
    X(ucp_init_version)                                                                                                                               \
    X(ucp_mem_map)                                                                                                                                    \
    X(ucp_mem_query)                                                                                                                                  \
    X(ucp_mem_unmap)                                                                                                                                  \
    X(ucp_put_nbx)                                                                                                                                    \
    X(ucp_request_check_status)                                                                                                                       \
    X(ucp_request_free)                                                                                                                               \
    X(ucp_rkey_buffer_release)                                                                                                                        \
    X(ucp_rkey_destroy)                                                                                                                               \
    X(ucp_rkey_pack)                                                                                                                                  \
    X(ucp_rkey_ptr)                                                                                                                                   \
    X(ucp_worker_arm)                                                                                                                                 \
    X(ucp_worker_create)                                                                                                                              \
    X(ucp_worker_destroy)                                                                                                                             \
    X(ucp_worker_get_address)                                                                                                                         \
    X(ucp_worker_get_efd)                                                                                                                             \
    X(ucp_worker_progress)                                                                                                                            \
    X(ucp_worker_release_address)                                                                                                                     \
    X(ucp_worker_set_am_recv_handler)

namespace baton {

struct Api {
#define BATON_DECLARE(name) decltype(&::name) name = nullptr;
    BATON_UCP_FUNCTIONS(BATON_DECLARE)
#undef BATON_DECLARE
};

struct LibraryInfo {
    std::string path;    // where the loader found it
    std::string version; // as the library says
    std::vector<std::string> missing; // functions that it lacks; then it is not used
    std::string problem; // the loader's words when it could not be opened
};

// Opens `path` (a path or a soname). A process uses one library: later calls return the first that was usable.
LibraryInfo load_library(const std::string &path);

// The functions. load_library must have succeeded.
const Api &ucp();

const char *status_text(ucs_status_t status);

} // namespace baton
