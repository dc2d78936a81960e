// How a link is connected, lost and closed.
#include "clock.hpp"
#include "failure.hpp"
#include "link.hpp"
#include "queue.hpp"

namespace baton {

namespace {

constexpr int64_t CLOSE_FLUSH_NS = 2'000'000'000;

} // namespace

void Link::open() {
    try {
        queue_->attach(shared_from_this());
        auto on_error = [this](ucs_status_t status) { fail(status, std::string("the endpoint broke: ") + status_text(status)); };
        connection_ = std::make_unique<Connection>(params_, queue_->worker(), std::move(worker_), this, on_error);
        if (own_worker()) {
            queue_->watch_worker(*own_worker());
        }
        has_greeted_ = connection_->greet();
        if (params_.same_host) {
            become_ready(!params_.device_pool.empty()          ? make_kernel_path(*this)
                         : connection_->pool().mapped() ? make_stores_path(*this)
                                                               : make_puts_path(*this));
        }
    } catch (const Failure &failure) {
        fail(ucs_status_t(failure.status()), failure.function() + ": " + failure.what());
    }
}

void Link::on_message(const MessageHeader &header, const char *payload, size_t num_bytes) {
    if (header.link != id()) {
        return; // not from this inbox
    }
    if (header.kind == MessageKind::WELCOME) {
        is_welcome_ = true; // the rest outside of UCX's progress
    } else if (header.kind == MessageKind::REFUSED) {
        fail(UCS_ERR_REJECTED, "the invitation is stale: another inbox is at its address");
    } else if (path_) {
        path_->on_message(header, payload, num_bytes, probe_.get());
    }
}

void Link::become_ready(std::unique_ptr<Path> path) {
    path_ = std::move(path);
    path_kind_ = path_->kind();
    transports_ = path_->transports();
    info_ = connection_->endpoint().info();
    std::lock_guard<std::mutex> lock(mutex_);
    if (state() == LinkState::CONNECTING) {
        state_.store(int(LinkState::READY), std::memory_order_release);
    }
    changed_.notify_all();
}

// Outside of UCX's callbacks. True when it did something.
bool Link::greet() {
    try {
        has_greeted_ = connection_->greet();
    } catch (const Failure &failure) {
        fail(ucs_status_t(failure.status()), failure.function() + ": " + failure.what());
        return true;
    }
    return has_greeted_;
}

// The connection stands, so that UCX's choice of transports is final.
void Link::be_welcomed() {
    try {
        become_ready(connection_->endpoint().has_puts() ? make_puts_path(*this) : make_messages_path(*this));
    } catch (const Failure &failure) {
        fail(ucs_status_t(failure.status()), failure.function() + ": " + failure.what());
    }
}

// Waiters learn of it at once; what was under way is settled in the next turn, outside of UCX's callbacks.
void Link::fail(ucs_status_t status, const std::string &text) {
    std::lock_guard<std::mutex> lock(mutex_);
    const LinkState before = state();
    if (before == LinkState::LOST || before == LinkState::CLOSED) {
        return;
    }
    failure_ = text;
    failure_status_ = status;
    state_.store(int(LinkState::LOST), std::memory_order_release);
    if (before == LinkState::READY && !closing_) {
        queue_->notices().push(NoticeKind::LINK_LOST, id());
    }
    changed_.notify_all();
}

void Link::start_closing() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        refusing_ = true;
    }
    if (closing_) {
        return;
    }
    closing_ = true;
    close_deadline_ns_ = now_ns() + CLOSE_FLUSH_NS;
    for (const auto &entry : open_) {
        entry.second->cancel_requested_ = true;
        run_again(entry.second);
    }
}

// While the link is well: everything is flushed first.
bool Link::close_step() {
    if (!closing_) {
        return false;
    }
    if (open_.empty() && !probe_) {
        shut();
        return true;
    }
    if (now_ns() > close_deadline_ns_) {
        fail(UCS_ERR_CANCELED, "closed before its writes could be flushed");
        return true;
    }
    return false;
}

// The link is lost: kernels end, UCX gives everything up, then the writes fail: a write fails only when nothing reads its source any more.
bool Link::settle() {
    runnable_.clear();
    gated_.clear(); // or the queue would go on looking at their events
    if (connection_) {
        if (path_ && path_->needs_progress()) {
            return path_->progress();
        }
        if (probe_) {
            probe_->fail(failure_status_, failure_text());
        }
        leave();
    }
    bool worked = false;
    std::vector<WritePtr> still;
    for (const auto &entry : open_) {
        still.push_back(entry.second);
    }
    for (const auto &write : still) {
        if (write->outstanding() == 0) {
            finalize(write, WriteState::FAILED, failure_status_, failure_text());
            worked = true;
        }
    }
    if (closing_ && open_.empty()) {
        shut();
        worked = true;
    }
    return worked;
}

// No request is in flight afterwards.
void Link::leave() {
    path_.reset();
    connection_.reset();
    worker_.reset();
}

void Link::shut() {
    runnable_.clear();
    gated_.clear();
    leave();
    probe_.reset();
    params_.source.reset();
    std::lock_guard<std::mutex> lock(mutex_);
    state_.store(int(LinkState::CLOSED), std::memory_order_release);
    changed_.notify_all();
}

} // namespace baton
