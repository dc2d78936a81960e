#include "probe.hpp"

#include "clock.hpp"
#include "copy.hpp"
#include "failure.hpp"
#include "path.hpp"

#include <algorithm>
#include <chrono>

namespace baton {

namespace {

constexpr int64_t MEASURED_BYTES = 64 << 20;
constexpr int64_t MAX_COUNT = 64;

} // namespace

Probe::Probe(MemoryPtr local, int64_t num_bytes, bool is_write)
    : local_(std::move(local)), num_bytes_(num_bytes), is_write_(is_write),
      count_(int(std::clamp<int64_t>(MEASURED_BYTES / num_bytes, 2, MAX_COUNT))) {}

bool Probe::step(Path &path) {
    if (done_ || flushing_) {
        return false;
    }
    if (!warm_ && posted_ > 0) {
        if (outstanding_ > 0) {
            return false;
        }
        warm_ = true;
        posted_ = 0;
        start_ns_ = now_ns();
    }
    if (posted_ < (warm_ ? count_ : 1)) {
        if (!path.has_room_for_probe(outstanding_, is_write_)) {
            return false;
        }
        ++posted_;
        path.post(*this);
        return true;
    }
    if (outstanding_ > 0) {
        return false;
    }
    flushing_ = true;
    path.flush(*this);
    return true;
}

void Probe::operation_ended(int status) {
    --outstanding_;
    if (status != UCS_OK) {
        fail(status, status_text(ucs_status_t(status)));
    }
}

void Probe::flush_ended(int status) {
    if (!flushing_ || outstanding_ == 0) {
        return; // an answer that nobody asked for
    }
    operation_ended(status);
    if (status == UCS_OK) {
        finish();
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

void Probe::arrived(int64_t offset, const char *payload, size_t num_bytes) {
    if (is_write_ || outstanding_ == 0 || offset < 0 || offset > num_bytes_ || int64_t(num_bytes) > num_bytes_ - offset) {
        return;
    }
    store_bytes(local() + offset, payload, num_bytes);
    pulled_bytes_ += int64_t(num_bytes);
    if (pulled_bytes_ >= num_bytes_) {
        pulled_bytes_ -= num_bytes_;
        --outstanding_;
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
