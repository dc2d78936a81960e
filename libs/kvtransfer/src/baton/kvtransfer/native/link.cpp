// The callers' half: they ask the queue's thread and wait.
#include "link.hpp"

#include "failure.hpp"
#include "queue.hpp"

#include <chrono>
#include <unistd.h>

namespace baton {

Link::Link(std::shared_ptr<Queue> queue, LinkParams params)
    : queue_(std::move(queue)), params_(std::move(params)), source_bytes_(params_.source->num_bytes()),
      worker_(params_.same_host ? nullptr : std::make_unique<Worker>(params_.source->context())) {}

Link::~Link() {
    if (params_.pidfd >= 0) {
        ::close(params_.pidfd);
    }
}

void Link::connect(int64_t timeout_ns) {
    auto self = shared_from_this();
    if (!queue_->run_soon([self] { self->open(); })) {
        throw Failure("connect", UCS_ERR_CANCELED, "the agent is closed");
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return state() != LinkState::CONNECTING; })) {
        throw Failure("connect", UCS_ERR_TIMED_OUT, "no answer in time: it hangs, or has no way back to this host (its log names one that it cannot answer)");
    }
    if (state() != LinkState::READY) {
        throw failure_.empty() ? Failure("connect", UCS_ERR_CANCELED, "it was closed meanwhile") : Failure("connect", failure_status_, failure_);
    }
}

WritePtr Link::begin(uint64_t write_id, uint64_t room) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refusing_ || state() != LinkState::READY) {
        return nullptr;
    }
    auto write = std::make_shared<Write>(shared_from_this(), write_id, room, source_bytes_, int64_t(params_.pool.num_bytes));
    write->touch(); // the queue learns of it, so that a lost peer fails it
    return write;
}

double Link::probe(MemoryPtr local, int64_t num_bytes, bool is_write, int64_t timeout_ns) {
    auto probe = std::make_shared<Probe>(std::move(local), num_bytes, is_write);
    auto self = shared_from_this();
    bool running = queue_->run_soon([self, probe] {
        if (self->state() != LinkState::READY || self->probe_) {
            probe->fail(UCS_ERR_BUSY, self->probe_ ? "another probe of this peer is running" : "the peer is lost or closed");
        } else {
            self->probe_ = probe;
        }
    });
    if (!running) {
        throw Failure("probe", UCS_ERR_CANCELED, "the agent is closed");
    }
    return probe->wait(timeout_ns);
}

void Link::lose(const std::string &why) {
    auto self = shared_from_this();
    queue_->run_soon([self, why] { self->fail(UCS_ERR_UNREACHABLE, why); });
}

void Link::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        refusing_ = true;
    }
    auto self = shared_from_this();
    const bool running = queue_->run_soon([self] { self->start_closing(); });
    std::unique_lock<std::mutex> lock(mutex_);
    if (running) {
        changed_.wait(lock, [this] { return state() == LinkState::CLOSED; });
    }
}

std::string Link::failure_text() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

} // namespace baton
