#include "worker.hpp"

#include "cuda.hpp"
#include "failure.hpp"

#include <array>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

namespace baton {

namespace {

constexpr size_t SPARE_DESCRIPTORS = 32; // a worker over tcp takes two, and three for every network device

// UCX 1.22 does not recover from a worker that failed for want of descriptors: a handler stays behind under the number of one that was closed, and
// no later worker that is given that number can be made (Element already exists). So it is not tried.
void require_descriptors() {
    std::array<int, SPARE_DESCRIPTORS> spare;
    size_t count = 0;
    while (count < spare.size() && (spare[count] = eventfd(0, EFD_CLOEXEC)) >= 0) {
        ++count;
    }
    const bool enough = count == spare.size();
    while (count > 0) {
        close(spare[--count]);
    }
    if (!enough) {
        struct rlimit limit{};
        getrlimit(RLIMIT_NOFILE, &limit);
        throw Failure("eventfd", UCS_ERR_EXCEEDS_LIMIT,
                      "fewer than " + std::to_string(SPARE_DESCRIPTORS) + " of this process's " + std::to_string(limit.rlim_cur) +
                          " descriptors are free, which a UCX worker may need: raise the limit (ulimit -n)");
    }
}

} // namespace

Worker::Worker(ContextPtr context) : context_(std::move(context)) {
    if (context_->device() >= 0) {
        cuda_bind(context_->device()); // whichever thread makes it
    }
    require_descriptors();
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    check("ucp_worker_create", ucp().ucp_worker_create(context_->handle(), &params, &handle_));
    ucs_status_t status = ucp().ucp_worker_get_efd(handle_, &event_fd_);
    if (status != UCS_OK) {
        ucp().ucp_worker_destroy(handle_);
        check("ucp_worker_get_efd", status);
    }
}

Worker::~Worker() { ucp().ucp_worker_destroy(handle_); }

bool Worker::arm() {
    ucs_status_t status = ucp().ucp_worker_arm(handle_);
    if (status == UCS_ERR_BUSY) {
        return false;
    }
    check("ucp_worker_arm", status);
    return true;
}

std::string Worker::address() const {
    ucp_address_t *address = nullptr;
    size_t length = 0;
    check("ucp_worker_get_address", ucp().ucp_worker_get_address(handle_, &address, &length));
    std::string bytes(reinterpret_cast<const char *>(address), length);
    ucp().ucp_worker_release_address(handle_, address);
    return bytes;
}

} // namespace baton
