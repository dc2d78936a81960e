// The way into one inbox, and the writes that are under way on it. Everything but the waiting functions runs on the queue's thread.
#pragma once

#include "connection.hpp"
#include "path.hpp"
#include "probe.hpp"
#include "write.hpp"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace baton {

class Queue;

enum class LinkState : int { CONNECTING = 0, READY = 1, LOST = 2, CLOSED = 3 };

class Link : public MessageSink, public std::enable_shared_from_this<Link> {
public:
    // Makes the worker that it needs over a network, in the source's context. Throws Failure.
    Link(std::shared_ptr<Queue> queue, LinkParams params);
    ~Link() override;

    // --- any thread (link.cpp) ---
    Queue &queue() const { return *queue_; }
    uint64_t id() const { return params_.id; }
    LinkState state() const { return LinkState(state_.load(std::memory_order_acquire)); }
    // Starts connecting and waits. Throws Failure (UCS_ERR_TIMED_OUT after timeout_ns).
    void connect(int64_t timeout_ns);
    // Null when the link is lost or closed.
    WritePtr begin(uint64_t write_id, uint64_t room);
    // GB/s of puts (or gets) of `num_bytes` between `local` and the receiver's scratch memory. Waits; throws Failure.
    double probe(MemoryPtr local, int64_t num_bytes, bool is_write, int64_t timeout_ns);
    // The caller knows that the way is gone: what is open fails.
    void lose(const std::string &why);
    // Stops posting, flushes, closes. Waits until nothing is on its way from here.
    void close();
    // Valid after connect.
    const std::string &transports() const { return transports_; }
    const std::string &info() const { return info_; }
    PathKind path_kind() const { return path_kind_; }
    std::string failure_text() const;

    // --- the queue's thread: opening, losing and closing (link_life.cpp) ---
    void open();
    void on_message(const MessageHeader &header, const char *payload, size_t num_bytes) override;
    void fail(ucs_status_t status, const std::string &text);
    void peer_process_ended() { fail(UCS_ERR_CONNECTION_RESET, "the receiver's process has ended"); }
    void start_closing();
    bool is_closing() const { return closing_; }
    bool is_over() const { return state() == LinkState::CLOSED; }
    int pidfd() const { return params_.pidfd; }

    // --- the queue's thread: turns (link_turns.cpp) ---
    void look_at(const WritePtr &write);
    // Posts what may be posted now. True when it did something.
    bool pump();
    // Of the link's own worker, if it has one.
    bool progress() { return own_worker() && own_worker()->progress() != 0; }
    bool arm() { return !own_worker() || own_worker()->arm(); }
    bool is_waiting_for_event() const { return !gated_.empty() || (path_ && path_->needs_progress()); }
    bool is_greeting() const { return state() == LinkState::CONNECTING && connection_ && !has_greeted_; }
    bool has_in_flight() const { return in_flight_ > 0; }

    // --- for its path ---
    const LinkParams &params() const { return params_; }
    const Memory &source() const { return *params_.source; }
    Connection &connection() { return *connection_; }
    bool may_put() const { return in_flight_ < params_.max_in_flight && state() == LinkState::READY; }
    void put_begins(Write &write);
    void put_done(Write &write, ucs_status_t status);
    // Of a flush or a ring.
    void flushed(Write &write, ucs_status_t status);
    void operation_ended(Write &write);

private:
    Worker *own_worker() const { return connection_ ? connection_->own_worker() : nullptr; }
    void become_ready(std::unique_ptr<Path> path);
    bool greet();
    void be_welcomed();
    bool close_step();
    bool settle();
    void leave();
    void shut();

    bool step_probe();
    bool try_gated();
    void wait_for_event(const WritePtr &write);
    void run_again(const WritePtr &write);
    void advance(const WritePtr &write);
    bool post_turn(const WritePtr &write);
    void flush(Write &write);
    void ring(Write &write);
    void finalize(const WritePtr &write, WriteState state, int status, const std::string &text);

    const std::shared_ptr<Queue> queue_;
    LinkParams params_;
    const int64_t source_bytes_;
    std::atomic<int> state_{int(LinkState::CONNECTING)};
    std::string transports_, info_, failure_;
    int failure_status_ = 0;
    PathKind path_kind_ = PathKind::PUTS;
    mutable std::mutex mutex_; // for waiters, and begin against close
    std::condition_variable changed_;
    bool refusing_ = false; // begin says no (guarded by mutex_)

    // of the queue's thread
    bool closing_ = false;
    int64_t close_deadline_ns_ = 0;
    bool has_greeted_ = false;
    bool is_welcome_ = false; // the receiver answered the greeting
    std::unique_ptr<Worker> worker_; // over a network: until the connection has it
    std::unique_ptr<Connection> connection_;
    std::unique_ptr<Path> path_; // from READY until the connection goes
    int in_flight_ = 0;
    std::unordered_map<uint64_t, WritePtr> open_; // every write that is not final
    std::deque<WritePtr> runnable_;               // of those: may have a turn
    std::vector<WritePtr> gated_;                 // of those: wait for an event
    std::shared_ptr<Probe> probe_;
};

using LinkPtr = std::shared_ptr<Link>;

} // namespace baton
