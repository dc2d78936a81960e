// The receiving half of an agent: one thread progresses the inboxes' workers (network transports), one waits for the bell (shared memory).
#pragma once

#include "bell.hpp"
#include "inbox.hpp"
#include "notices.hpp"

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

class Receiver {
public:
    // bell: BELL_BYTES that senders on this host map where `shared`. device: CUDA device whose memory messages are stored in, -1 for none.
    // has_network: senders may come over a network, which needs progress here.
    Receiver(MemoryPtr bell, int device, std::shared_ptr<Notices> notices, bool has_network, bool shared);
    ~Receiver();
    Receiver(const Receiver &) = delete;
    Receiver &operator=(const Receiver &) = delete;

    // Throws Failure.
    InboxPtr open_inbox(uint64_t id, uint64_t nonce, uint32_t num_doorbells, const ContextPtr &shared, const NetworkWay &network);
    // A doorbell was armed: the backstop must be running.
    void armed();
    // Takes the inbox out of the threads' hands and shuts it.
    void shut(const InboxPtr &inbox);
    void forget(const InboxPtr &inbox);
    void stop();

private:
    void run_progress();
    void run_bell();
    std::vector<InboxPtr> inboxes();
    bool any_armed();
    void wake_progress();

    const int device_;
    std::shared_ptr<Notices> notices_;
    const bool has_network_;
    const bool shared_;
    MemoryPtr bell_memory_;
    Bell *bell_;
    int wake_fd_ = -1;
    int epoll_fd_ = -1;
    std::mutex mutex_;
    std::vector<InboxPtr> inboxes_;
    std::atomic<bool> stopping_{false};
    std::thread progress_thread_, bell_thread_;
};

} // namespace baton
