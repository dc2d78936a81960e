// A transfer queue: one native thread. Peers are pinned to a queue, so that one that hangs delays no other queue.
#pragma once

#include "link.hpp"
#include "notices.hpp"
#include "worker.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

class Queue {
public:
    // context: of the worker that its links on this host share; null: all come with a worker of their own. device: CUDA device whose memory is
    // moved, -1 for none.
    Queue(const ContextPtr &context, int device, std::shared_ptr<Notices> notices, int spin_us);
    // Closes its links and joins the thread.
    ~Queue();
    Queue(const Queue &) = delete;
    Queue &operator=(const Queue &) = delete;

    // Any thread: runs `command` on the queue's thread. False: the queue has stopped.
    bool run_soon(std::function<void()> command);
    // Any thread: the write has something new.
    void submit(WritePtr write);
    void stop();

    // The queue's thread.
    // Null without a context.
    Worker *worker() { return worker_.get(); }
    // Its events wake the queue.
    void watch_worker(const Worker &worker);
    Notices &notices() { return *notices_; }
    void attach(const LinkPtr &link);
    int num_links() const { return num_links_.load(std::memory_order_relaxed); }

private:
    void run();
    bool take_commands();
    bool pump_links();
    void sleep();
    int64_t patience_ns() const;
    void wake();
    void look_for_events(int timeout_ms);

    const int device_;
    std::shared_ptr<Notices> notices_;
    std::unique_ptr<Worker> worker_;
    int64_t spin_ns_;
    int wake_fd_ = -1;
    int epoll_fd_ = -1;
    std::vector<LinkPtr> links_;
    std::atomic<int> num_links_{0};

    std::mutex mutex_;
    std::vector<std::function<void()>> commands_;
    std::vector<WritePtr> submitted_;
    bool stopping_ = false;
    bool ended_ = false; // the thread looks at nothing any more
    std::atomic<bool> has_commands_{false};
    std::atomic<bool> sleeping_{false};
    std::thread thread_;
};

using QueuePtr = std::shared_ptr<Queue>;

} // namespace baton
