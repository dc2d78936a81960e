#include "probe.hpp"

#include "clock.hpp"
#include "copy.hpp"
#include "failure.hpp"
#include "link.hpp"

#include <algorithm>
#include <chrono>

namespace baton {

namespace {

constexpr int WINDOW = 16;
constexpr int64_t MEASURED_BYTES = 64 << 20;
constexpr int MAX_COUNT = 64;

} // namespace

Probe::Probe(MemoryPtr local, int64_t num_bytes, bool is_write) : local_(std::move(local)), num_bytes_(num_bytes), is_write_(is_write) {
    count_ = int(std::clamp<int64_t>(MEASURED_BYTES / num_bytes, 2, MAX_COUNT));
}

bool Probe::step(Link &link) {
    if (done_ || flushing_) {
        return false;
    }
    if (!warm_) {
        if (posted_ == 0) {
            post(link);
            return true;
        }
        if (outstanding_ > 0) {
            return false;
        }
        warm_ = true;
        posted_ = 0;
        start_ns_ = now_ns();
    }
    if (posted_ < count_ && outstanding_ < WINDOW) {
        post(link);
        return true;
    }
    if (posted_ == count_) {
        flush(link);
        return true;
    }
    return false;
}

void Probe::post(Link &link) {
    char *local = reinterpret_cast<char *>(local_->address());
    ++posted_;
    if (link.mapped_ && link.scratch_.mapped()) {
        is_write_ ? store_bytes(link.scratch_.mapped(), local, size_t(num_bytes_)) : store_bytes(local, link.scratch_.mapped(), size_t(num_bytes_));
        return;
    }
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
    params.cb.send = on_done;
    params.user_data = this;
    params.memh = local_->handle();
    const auto endpoint = link.endpoint_->handle();
    const auto &remote = link.scratch_;
    ucs_status_ptr_t request = is_write_ ? ucp().ucp_put_nbx(endpoint, local, size_t(num_bytes_), remote.address(), remote.key(), &params)
                                         : ucp().ucp_get_nbx(endpoint, local, size_t(num_bytes_), remote.address(), remote.key(), &params);
    if (UCS_PTR_IS_ERR(request)) {
        fail(UCS_PTR_STATUS(request), status_text(UCS_PTR_STATUS(request)));
    } else if (request) {
        ++outstanding_;
    }
}

void Probe::on_done(void *request, ucs_status_t status, void *probe) {
    ucp().ucp_request_free(request);
    auto *self = static_cast<Probe *>(probe);
    --self->outstanding_;
    if (status != UCS_OK) {
        self->fail(status, status_text(status));
    }
}

void Probe::flush(Link &link) {
    flushing_ = true;
    if (link.mapped_) {
        store_fence();
        finish();
        return;
    }
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.send = on_flushed;
    params.user_data = this;
    ucs_status_ptr_t request = ucp().ucp_ep_flush_nbx(link.endpoint_->handle(), &params);
    if (UCS_PTR_IS_ERR(request)) {
        fail(UCS_PTR_STATUS(request), status_text(UCS_PTR_STATUS(request)));
    } else if (!request) {
        finish();
    } else {
        ++outstanding_;
    }
}

void Probe::on_flushed(void *request, ucs_status_t status, void *probe) {
    ucp().ucp_request_free(request);
    auto *self = static_cast<Probe *>(probe);
    --self->outstanding_;
    if (status == UCS_OK) {
        self->finish();
    } else {
        self->fail(status, status_text(status));
    }
}

void Probe::finish() {
    end_ns_ = now_ns();
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    changed_.notify_all();
}

void Probe::fail(int status, const std::string &text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_) {
        done_ = true;
        status_ = status;
        text_ = text;
        changed_.notify_all();
    }
}

double Probe::wait(int64_t timeout_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return done_; })) {
        throw Failure("probe", UCS_ERR_TIMED_OUT, "no completion in time");
    }
    if (status_ != 0) {
        throw Failure("probe", status_, text_);
    }
    return double(num_bytes_) * count_ / double(std::max<int64_t>(end_ns_ - start_ns_, 1));
}

} // namespace baton
