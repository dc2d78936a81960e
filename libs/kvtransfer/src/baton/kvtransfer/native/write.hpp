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
    int64_t reach = 0;        // bytes of the destination that it touches, at most
    size_t next = 0;
    int64_t done_of_next = 0; // bytes of spans[next] already posted
};

// What became of one `post`: from its first byte handed to the transport until the transport was done with its source. Times of now_ns().
struct WritePart {
    int64_t begin_ns = 0;
    int64_t end_ns = 0;
    int64_t num_bytes = 0;
};

enum class WriteState : int { OPEN = 0, DONE = 1, QUIESCED = 2, FAILED = 3 };

class Write : public std::enable_shared_from_this<Write> {
public:
    static constexpr long ACCEPTED = -1;
    static constexpr long REFUSED = -2; // finished, cancelled or final
    static constexpr size_t MAX_PARTS = 1024;

    Write(std::shared_ptr<Link> link, uint64_t id, uint64_t room, int64_t source_bytes, int64_t destination_bytes);

    // --- any thread ---
    // rows: n times source offset, destination offset, bytes. Returns ACCEPTED, REFUSED, or the index of the first row outside a region.
    long post(const int64_t *rows, size_t n, uint64_t ready_event);
    // ACCEPTED or REFUSED.
    long finish(uint32_t slot, Record record);
    void cancel();
    // The queue is to look at this write.
    void touch();

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
    // One for each post in order, the last of MAX_PARTS for all that follow. None before DONE: then nothing of the write is under way any more.
    std::vector<WritePart> parts() const;
    // Valid once FAILED.
    int error_status() const { return error_status_; }
    const std::string &error_text() const { return error_text_; }

    // --- the queue's thread ---
    enum class Phase { POSTING, FLUSHING, FLUSHED, RINGING, RUNG, FINAL };
    Phase phase() const { return phase_; }
    // Whether a piece may be posted now, and the next one, at most `max_bytes` long.
    bool has_piece() const { return !batches_.empty() && batches_.front().ready_event == 0; }
    bool awaits_event() const { return !batches_.empty() && batches_.front().ready_event != 0; }
    bool is_cancelled() const { return cancel_requested_; }
    Span take_piece(int64_t max_bytes);
    // Bytes of the destination that all that was posted so far touches, at most.
    int64_t reach() const { return reach_; }
    // Bytes of the next span that are not posted yet.
    int64_t next_bytes() const { return batches_.front().spans[batches_.front().next].length - batches_.front().done_of_next; }
    // A put of so many bytes is handed to the transport.
    void count_put(int64_t num_bytes);
    // Something that refers to this write is under way: a put, a launch, a flush.
    void begin_operation();
    void end_operation();
    int outstanding() const { return outstanding_; }
    uint32_t slot() const { return slot_; }
    const Record &record() const { return record_; }

private:
    friend class Link; // it decides about phases and ends
    void take_incoming();
    void begin_part();
    void end_parts();
    // False: it was final before.
    bool end(WriteState state, int status, const std::string &text);

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
    int64_t reach_ = 0;
    bool finishing_ = false;
    bool runnable_ = false; // in the link's list of those that may have a turn
    bool gated_ = false;    // in the link's list of those that wait for an event, once however often more is posted meanwhile
    int outstanding_ = 0;
    int64_t busy_since_ns_ = 0;
    int64_t num_begun_ = 0, num_ended_ = 0; // operations
    std::vector<WritePart> parts_;
    std::vector<int64_t> ends_with_; // of each part: after how many operations it has ended; 0 while pieces of it are left
    size_t num_ended_parts_ = 0;
    std::string local_error_; // why it must not be finished although the link is well
};

using WritePtr = std::shared_ptr<Write>;

} // namespace baton
