// One request's writes. The caller's half (post, finish, cancel, reading the numbers) takes a short lock; the other half belongs to the queue's thread.
#pragma once

#include "doorbell.hpp"

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace baton {

class Link;

struct Span {
    int64_t source;
    int64_t destination;
    int64_t length;
};

struct Batch {
    std::vector<Span> spans;
    uint64_t ready_event = 0; // CUDA event that must have fired; 0: none
    size_t next = 0;
    int64_t done_of_next = 0; // bytes of spans[next] already posted
};

enum class WriteState : int { OPEN = 0, DONE = 1, QUIESCED = 2, FAILED = 3 };

class Write : public std::enable_shared_from_this<Write> {
public:
    static constexpr long ACCEPTED = -1;
    static constexpr long REFUSED = -2; // finished, cancelled or final

    Write(std::shared_ptr<Link> link, uint64_t id, uint64_t room, int64_t source_bytes, int64_t destination_bytes);

    // rows: n times source offset, destination offset, bytes. Returns ACCEPTED, REFUSED, or the index of the first row outside a region.
    long post(const int64_t *rows, size_t n, uint64_t ready_event);
    // ACCEPTED or REFUSED. The record is sealed here.
    long finish(uint32_t slot, Record record);
    void cancel();

    Link &link() const { return *link_; }
    uint64_t id() const { return id_; }
    uint64_t room() const { return room_; }
    WriteState state() const { return WriteState(state_.load(std::memory_order_acquire)); }
    int64_t num_bytes() const { return num_bytes_.load(std::memory_order_relaxed); }
    int64_t num_puts() const { return num_puts_.load(std::memory_order_relaxed); }
    int64_t first_post_ns() const { return first_post_ns_.load(std::memory_order_relaxed); }
    // Time with something of this write under way: a store, a put, a flush.
    int64_t busy_ns() const { return busy_ns_.load(std::memory_order_relaxed); }
    int64_t done_ns() const { return done_ns_.load(std::memory_order_relaxed); }
    // Valid once FAILED.
    int error_status() const { return error_status_; }
    const std::string &error_text() const { return error_text_; }

private:
    friend class Link;
    enum class Phase { POSTING, FLUSHING, FLUSHED, RINGING, RUNG, FINAL };

    void touch();
    void begin_operation();
    void end_operation();

    const std::shared_ptr<Link> link_;
    const uint64_t id_;
    const uint64_t room_;
    const int64_t source_bytes_;
    const int64_t destination_bytes_;

    std::mutex mutex_; // guards what follows
    std::deque<Batch> incoming_;
    bool finish_requested_ = false;
    uint32_t slot_ = 0;
    Record record_;

    std::atomic<bool> cancel_requested_{false};
    std::atomic<bool> touched_{false}; // already in the queue's list of writes to look at
    std::atomic<int> state_{0};
    std::atomic<int64_t> num_bytes_{0};
    std::atomic<int64_t> num_puts_{0};
    std::atomic<int64_t> first_post_ns_{0};
    std::atomic<int64_t> busy_ns_{0};
    std::atomic<int64_t> done_ns_{0};
    int error_status_ = 0;
    std::string error_text_;

    // of the queue's thread
    Phase phase_ = Phase::POSTING;
    std::deque<Batch> batches_;
    bool finishing_ = false;
    bool runnable_ = false;
    bool gated_ = false; // in the link's list of those that wait for an event, once however often more is posted meanwhile
    int outstanding_ = 0;     // UCX requests that refer to this write
    int64_t busy_since_ns_ = 0;
    std::string local_error_; // why it must not be finished although the link is well
};

using WritePtr = std::shared_ptr<Write>;

} // namespace baton
