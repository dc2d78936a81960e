#include "worker.hpp"

#include "cuda.hpp"
#include "failure.hpp"

namespace baton {

Worker::Worker(ContextPtr context) : context_(std::move(context)) {
    if (context_->device() >= 0) {
        cuda_bind(context_->device()); // whichever thread makes it
    }
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
