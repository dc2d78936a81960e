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
constexpr uint64_t TICKET = ~0ull; // of the probe under way; writes count from 1
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
    const int window = link.path_ == Path::KERNEL ? 4 : link.path_ == Path::MESSAGES && !is_write_ ? 1 : WINDOW; // pulls are told apart by their bytes only
    if (posted_ < count_ && outstanding_ < window) {
        post(link);
        return true;
    }
    const bool ends_by_completion = !is_write_ || link.path_ == Path::KERNEL;
    if (posted_ == count_ && (!ends_by_completion || outstanding_ == 0)) {
        flush(link);
        return true;
    }
    return false;
}

void Probe::post(Link &link) {
    char *local = reinterpret_cast<char *>(local_->address());
    ++posted_;
    if (link.path_ == Path::KERNEL) {
        post_launch(link);
    } else if (link.path_ == Path::MESSAGES) {
        post_messages(link);
    } else if (link.path_ == Path::STORES && link.scratch_.mapped()) {
        is_write_ ? store_bytes(link.scratch_.mapped(), local, size_t(num_bytes_)) : store_bytes(local, link.scratch_.mapped(), size_t(num_bytes_));
    } else {
        post_put(link);
    }
}

void Probe::post_launch(Link &link) {
    std::vector<Span> tiles;
    for (int64_t offset = 0; offset < num_bytes_; offset += Scatter::TILE_BYTES) {
        tiles.push_back({offset, offset, std::min(Scatter::TILE_BYTES, num_bytes_ - offset)});
    }
    ++outstanding_;
    const uint64_t remote = link.device_scratch_->address();
    is_write_ ? link.launch(tiles, local_->address(), remote, nullptr) : link.launch(tiles, remote, local_->address(), nullptr);
}

void Probe::post_messages(Link &link) {
    const auto endpoint = link.endpoint_->handle();
    if (!is_write_) {
        MessageHeader pull = link.header(MessageKind::PULL);
        pull.number = uint64_t(num_bytes_);
        pull.ticket = TICKET;
        ++outstanding_;
        send_copy(endpoint, pull);
        return;
    }
    for (int64_t offset = 0; offset < num_bytes_; offset += MESSAGE_BYTES) {
        MessageHeader write = link.header(MessageKind::WRITE);
        write.target = Target::SCRATCH;
        write.offset = uint64_t(offset);
        ++link.num_written_;
        ++outstanding_;
        const char *from = reinterpret_cast<const char *>(local_->address()) + offset;
        send_message(endpoint, write, from, size_t(std::min(MESSAGE_BYTES, num_bytes_ - offset)), local_->handle(),
                     [this](ucs_status_t status) { put_done(status); });
    }
}

void Probe::post_put(Link &link) {
    char *local = reinterpret_cast<char *>(local_->address());
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
    params.cb.send = on_put;
    params.user_data = this;
    params.memh = local_->handle();
    const auto endpoint = link.endpoint_->handle();
    const auto &remote = link.scratch_;
    ++outstanding_;
    ucs_status_ptr_t request = is_write_ ? ucp().ucp_put_nbx(endpoint, local, size_t(num_bytes_), remote.address(), remote.key(), &params)
                                         : ucp().ucp_get_nbx(endpoint, local, size_t(num_bytes_), remote.address(), remote.key(), &params);
    if (!UCS_PTR_IS_PTR(request)) {
        put_done(UCS_PTR_STATUS(request));
    }
}

void Probe::on_put(void *request, ucs_status_t status, void *probe) {
    ucp().ucp_request_free(request);
    static_cast<Probe *>(probe)->put_done(status);
}

void Probe::put_done(ucs_status_t status) {
    --outstanding_;
    if (status != UCS_OK) {
        fail(status, status_text(status));
    }
}

void Probe::arrived(const MessageHeader &header, const char *payload, size_t num_bytes) {
    if (header.ticket != TICKET || is_write_ || header.offset > uint64_t(num_bytes_) || num_bytes > uint64_t(num_bytes_) - header.offset) {
        return;
    }
    store_bytes(reinterpret_cast<char *>(local_->address()) + header.offset, payload, num_bytes);
    pulled_bytes_ += int64_t(num_bytes);
    if (pulled_bytes_ >= num_bytes_) {
        pulled_bytes_ -= num_bytes_;
        --outstanding_;
    }
}

void Probe::acknowledged(uint64_t ticket) {
    if (flushing_ && ticket == TICKET) {
        --outstanding_;
        finish();
    }
}

void Probe::flush(Link &link) {
    flushing_ = true;
    if (link.path_ == Path::STORES) {
        store_fence();
        finish();
        return;
    }
    if (link.path_ == Path::KERNEL) {
        finish(); // all launches have ended
        return;
    }
    if (link.path_ == Path::MESSAGES) {
        MessageHeader ask = link.header(MessageKind::FLUSH);
        ask.number = link.num_written_;
        ask.ticket = TICKET;
        ++outstanding_;
        send_copy(link.endpoint_->handle(), ask);
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
