#include "queue.hpp"

#include "clock.hpp"
#include "cuda.hpp"
#include "failure.hpp"

#include <algorithm>
#include <cerrno>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace baton {

namespace {

constexpr uint64_t WAKE = ~0ull, WORKER = ~0ull - 1; // epoll data; anything else is the id of a link whose process is watched
constexpr int64_t LOOK_EVERY_NS = 10'000'000;        // between two looks of a busy loop at the watched processes
constexpr int64_t BUSY_PATIENCE_NS = 300'000;         // before sleeping while bytes are under way; the processor is offered to others meanwhile
constexpr int64_t EVENT_POLL_NS = 20'000;            // while a write waits for a CUDA event

void watch(int epoll_fd, int fd, uint64_t data) {
    struct epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = data;
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
        fail_errno("epoll_ctl");
    }
}

} // namespace

Queue::Queue(const ContextPtr &context, int device, std::shared_ptr<Notices> notices, int spin_us)
    : device_(device), notices_(std::move(notices)), worker_(context ? std::make_unique<Worker>(context) : nullptr), spin_ns_(int64_t(spin_us) * 1000) {
    wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
    if (wake_fd_ < 0 || epoll_fd_ < 0) {
        fail_errno("eventfd or epoll_create1");
    }
    watch(epoll_fd_, wake_fd_, WAKE);
    if (worker_) {
        watch(epoll_fd_, worker_->event_fd(), WORKER);
    }
    thread_ = std::thread([this] { run(); });
}

Queue::~Queue() {
    stop();
    close(wake_fd_);
    close(epoll_fd_);
}

bool Queue::run_soon(std::function<void()> command) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_) {
            return false;
        }
        commands_.push_back(std::move(command));
        has_commands_.store(true, std::memory_order_seq_cst);
    }
    wake();
    return true;
}

void Queue::submit(WritePtr write) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (ended_) {
            return; // final: its link was closed before
        }
        submitted_.push_back(std::move(write));
        has_commands_.store(true, std::memory_order_seq_cst);
    }
    wake();
}

void Queue::wake() {
    if (sleeping_.load(std::memory_order_seq_cst)) {
        const uint64_t one = 1;
        [[maybe_unused]] ssize_t written = write(wake_fd_, &one, sizeof(one)); // full means already awake
    }
}

void Queue::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        has_commands_.store(true, std::memory_order_seq_cst);
    }
    const uint64_t one = 1;
    [[maybe_unused]] ssize_t written = write(wake_fd_, &one, sizeof(one));
    if (thread_.joinable()) {
        thread_.join();
    }
}

void Queue::attach(const LinkPtr &link) {
    links_.push_back(link);
    num_links_.store(int(links_.size()), std::memory_order_relaxed);
    if (link->pidfd() >= 0) {
        watch(epoll_fd_, link->pidfd(), link->id());
    }
}

void Queue::watch_worker(const Worker &worker) { watch(epoll_fd_, worker.event_fd(), WORKER); }

void Queue::run() {
    pthread_setname_np(pthread_self(), "baton-kv-queue");
    if (device_ >= 0) {
        cuda_bind(device_);
    }
    int64_t idle_since_ns = 0;
    int64_t last_look_ns = 0;
    bool leaving = false;
    while (!leaving || !links_.empty()) {
        bool worked = false;
        if (has_commands_.load(std::memory_order_seq_cst)) {
            worked = true;
            leaving = take_commands();
        }
        worked |= worker_ && worker_->progress() != 0;
        worked |= pump_links();
        const int64_t now = now_ns();
        if (now - last_look_ns > LOOK_EVERY_NS) {
            look_for_events(0);
            last_look_ns = now;
        }
        if (worked) {
            idle_since_ns = 0;
        } else if (idle_since_ns == 0) {
            idle_since_ns = now;
        } else if (!leaving && now - idle_since_ns >= patience_ns()) {
            sleep();
            idle_since_ns = 0;
        } else if (now - idle_since_ns >= spin_ns_) {
            sched_yield();
        }
    }
    worker_.reset();
    std::vector<WritePtr> late; // final; they hold their links, and those this queue
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    late.swap(submitted_);
}

// True when the queue is to end: every link is then closing.
bool Queue::take_commands() {
    std::vector<std::function<void()>> commands;
    std::vector<WritePtr> submitted;
    bool stopping;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        commands.swap(commands_);
        submitted.swap(submitted_);
        stopping = stopping_;
        has_commands_.store(false, std::memory_order_seq_cst);
    }
    for (const auto &command : commands) {
        command();
    }
    for (const auto &write : submitted) {
        write->link().look_at(write);
    }
    if (stopping) {
        for (const auto &link : links_) {
            link->start_closing();
        }
    }
    return stopping;
}

bool Queue::pump_links() {
    bool worked = false;
    bool any_over = false;
    for (size_t i = 0; i < links_.size(); ++i) {
        worked |= links_[i]->progress();
        worked |= links_[i]->pump();
        any_over |= links_[i]->is_over();
    }
    if (any_over) {
        for (const auto &link : links_) {
            if (link->is_over() && link->pidfd() >= 0) {
                epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, link->pidfd(), nullptr);
            }
        }
        links_.erase(std::remove_if(links_.begin(), links_.end(), [](const LinkPtr &link) { return link->is_over(); }), links_.end());
        num_links_.store(int(links_.size()), std::memory_order_relaxed);
    }
    return worked;
}

// Bytes under way will want more work soon: going to sleep and being woken costs more than looking again.
int64_t Queue::patience_ns() const {
    const bool busy = std::any_of(links_.begin(), links_.end(), [](const LinkPtr &link) { return link->has_in_flight(); });
    return busy ? std::max(spin_ns_, BUSY_PATIENCE_NS) : spin_ns_;
}

void Queue::sleep() {
    if (std::any_of(links_.begin(), links_.end(), [](const LinkPtr &link) { return link->is_waiting_for_event(); })) {
        struct timespec pause{0, EVENT_POLL_NS};
        nanosleep(&pause, nullptr);
        return;
    }
    int timeout_ms = -1;
    if (std::any_of(links_.begin(), links_.end(), [](const LinkPtr &link) { return link->is_closing() || link->is_greeting(); })) {
        timeout_ms = 10; // its deadline must be noticed
    }
    sleeping_.store(true, std::memory_order_seq_cst);
    try {
        const bool armed = (!worker_ || worker_->arm()) && std::all_of(links_.begin(), links_.end(), [](const LinkPtr &link) { return link->arm(); });
        if (armed && !has_commands_.load(std::memory_order_seq_cst)) {
            look_for_events(timeout_ms);
        }
    } catch (const Failure &failure) {
        for (const auto &link : links_) {
            link->fail(ucs_status_t(failure.status()), failure.function() + ": " + failure.what());
        }
    }
    sleeping_.store(false, std::memory_order_seq_cst);
}

void Queue::look_for_events(int timeout_ms) {
    struct epoll_event events[16];
    const int count = epoll_wait(epoll_fd_, events, 16, timeout_ms);
    for (int i = 0; i < count; ++i) {
        const uint64_t data = events[i].data.u64;
        if (data == WAKE) {
            uint64_t counter;
            [[maybe_unused]] ssize_t taken = read(wake_fd_, &counter, sizeof(counter));
        } else if (data != WORKER) {
            for (const auto &link : links_) {
                if (link->id() == data) {
                    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, link->pidfd(), nullptr);
                    link->peer_process_ended();
                }
            }
        }
    }
}

} // namespace baton
