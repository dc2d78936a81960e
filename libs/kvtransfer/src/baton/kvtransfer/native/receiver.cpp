#include "receiver.hpp"

#include "clock.hpp"
#include "cuda.hpp"
#include "failure.hpp"

#include <algorithm>
#include <cstring>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace baton {

namespace {

constexpr int BACKSTOP_MS = 10;           // between two looks that nobody asked for, while doorbells are armed
constexpr int64_t IDLE_US = 1'000'000;    // between two looks at nothing
constexpr int TURNS_OF_ONE_INBOX = 256;   // before the others have theirs
constexpr int64_t BUSY_PATIENCE_NS = 300'000; // before sleeping after traffic; the processor is offered to others meanwhile
// After so many events in a row a look that finds nothing waits before the next one: bytes that come in bulk are taken in bulk. Looking without a pause
// takes a fifth of its speed from a sender on the same host (the two share the socket's cache lines).
constexpr unsigned BULK_EVENTS = 4;
constexpr int64_t BULK_PAUSE_NS = 50'000;
constexpr uint64_t WAKE = ~0ull;

} // namespace

Receiver::Receiver(MemoryPtr bell, int device, std::shared_ptr<Notices> notices, bool has_network, bool shared)
    : device_(device), notices_(std::move(notices)), has_network_(has_network), shared_(shared), bell_memory_(std::move(bell)),
      bell_(reinterpret_cast<Bell *>(bell_memory_->address())) {
    std::memset(static_cast<void *>(bell_), 0, sizeof(Bell));
    if (has_network_) {
        wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = WAKE;
        if (wake_fd_ < 0 || epoll_fd_ < 0 || epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) != 0) {
            fail_errno("eventfd or epoll");
        }
        progress_thread_ = std::thread([this] { run_progress(); });
    }
    try {
        if (shared_) {
            bell_thread_ = std::thread([this] { run_bell(); });
        }
    } catch (...) {
        stop(); // no more threads are to be had; the other one must not outlive this
        throw;
    }
}

Receiver::~Receiver() {
    stop();
    if (has_network_) {
        close(wake_fd_);
        close(epoll_fd_);
    }
}

InboxPtr Receiver::open_inbox(uint64_t id, uint64_t nonce, uint32_t num_doorbells, const ContextPtr &shared, const NetworkWay &network) {
    auto inbox = std::make_shared<Inbox>(id, nonce, num_doorbells, shared, network);
    std::lock_guard<std::mutex> lock(mutex_);
    inboxes_.push_back(inbox);
    if (inbox->event_fd() >= 0) {
        struct epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = id;
        if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, inbox->event_fd(), &event) != 0) {
            inboxes_.pop_back();
            fail_errno("epoll_ctl");
        }
        wake_progress(); // its worker must be armed once
    }
    return inbox;
}

void Receiver::armed() {
    if (shared_) {
        ring(*bell_);
    } else {
        wake_progress();
    }
}

void Receiver::shut(const InboxPtr &inbox) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const int event_fd = inbox->take_event_fd();
        if (event_fd >= 0) {
            epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, event_fd, nullptr);
        }
    }
    inbox->shut();
}

void Receiver::forget(const InboxPtr &inbox) {
    shut(inbox);
    std::lock_guard<std::mutex> lock(mutex_);
    inboxes_.erase(std::remove(inboxes_.begin(), inboxes_.end(), inbox), inboxes_.end());
}

void Receiver::stop() {
    stopping_.store(true);
    if (has_network_) {
        wake_progress();
    }
    if (shared_) {
        ring(*bell_);
    }
    if (progress_thread_.joinable()) {
        progress_thread_.join();
    }
    if (bell_thread_.joinable()) {
        bell_thread_.join();
    }
}

void Receiver::wake_progress() {
    const uint64_t one = 1;
    [[maybe_unused]] ssize_t written = write(wake_fd_, &one, sizeof(one)); // full means already awake
}

std::vector<InboxPtr> Receiver::inboxes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return inboxes_;
}

bool Receiver::any_armed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::any_of(inboxes_.begin(), inboxes_.end(), [](const InboxPtr &inbox) { return inbox->has_armed(); });
}

void Receiver::run_progress() {
    pthread_setname_np(pthread_self(), "baton-kv-inbox");
    if (device_ >= 0) {
        cuda_bind(device_);
    }
    struct epoll_event events[16];
    int64_t last_event_ns = 0;
    unsigned num_unpaused = 0; // events since the last pause
    while (!stopping_.load()) {
        bool any = false, busy = false;
        for (const auto &inbox : inboxes()) {
            unsigned num_events = 0, turns = 0, total = 0;
            while (turns++ < TURNS_OF_ONE_INBOX && inbox->progress(num_events) && num_events > 0) {
                total += num_events;
            }
            if (inbox->has_armed() && inbox->scan(total > 0 ? Look::AWOKEN : Look::BACKSTOP)) {
                notices_->push(NoticeKind::DOORBELL, inbox->id());
            }
            if (inbox->take_unanswered()) {
                notices_->push(NoticeKind::UNANSWERED, inbox->id());
            }
            num_unpaused += total;
            any |= total > 0;
        }
        const int64_t now = now_ns();
        if (any) {
            last_event_ns = now;
        }
        if (now - last_event_ns < BUSY_PATIENCE_NS) {
            if (!any && num_unpaused >= BULK_EVENTS) {
                num_unpaused = 0;
                pause_until(now + BULK_PAUSE_NS);
            }
            sched_yield();
            continue;
        }
        for (const auto &inbox : inboxes()) {
            busy |= !inbox->arm_worker();
        }
        if (busy) {
            continue;
        }
        const int count = epoll_wait(epoll_fd_, events, 16, any_armed() ? BACKSTOP_MS : -1);
        for (int i = 0; i < count; ++i) {
            if (events[i].data.u64 == WAKE) {
                uint64_t counter;
                [[maybe_unused]] ssize_t taken = read(wake_fd_, &counter, sizeof(counter));
            }
        }
    }
}

void Receiver::run_bell() {
    pthread_setname_np(pthread_self(), "baton-kv-bell");
    bool rung = true;
    while (!stopping_.load()) {
        const uint32_t seen = bell_->count.load(std::memory_order_seq_cst);
        for (const auto &inbox : inboxes()) {
            if (inbox->has_armed() && inbox->scan(rung ? Look::AWOKEN : Look::BACKSTOP)) {
                notices_->push(NoticeKind::DOORBELL, inbox->id());
            }
        }
        wait_for_ring(*bell_, seen, any_armed() ? BACKSTOP_MS * 1000 : IDLE_US);
        rung = bell_->count.load(std::memory_order_seq_cst) != seen;
    }
}

} // namespace baton
