// The way into one inbox: endpoint, keys, and the writes that are under way. Everything but the waiting functions runs on the queue's thread.
#pragma once

#include "endpoint.hpp"
#include "cuda.hpp"
#include "memory.hpp"
#include "message.hpp"
#include "probe.hpp"
#include "scatter.hpp"
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

// What connecting needs.
struct LinkParams {
    uint64_t id = 0;
    std::string worker_address;
    Window pool, table, bell, scratch;
    uint64_t nonce = 0;
    uint32_t num_doorbells = 0;
    bool same_host = false; // shared memory: no peer errors from UCX, the receiver's process is watched instead
    int pidfd = -1;         // of the receiver's process when same_host; owned by the link from here on
    MemoryPtr source;
    std::string device_pool, device_scratch; // exported device memory; empty: none, or it cannot be shared
    int max_in_flight = 64;
    int64_t max_put_bytes = 16 << 20;
};

// How the bytes get there.
enum class Path : int {
    STORES = 0,   // the receiver's memory is mapped here: plain stores
    PUTS = 1,     // the transport has puts of its own (cma, CUDA IPC, RDMA)
    MESSAGES = 2, // it has none (tcp): see message.hpp
    KERNEL = 3,   // the receiver's device memory is mapped here: a kernel stores into it
};

enum class LinkState : int { CONNECTING = 0, READY = 1, LOST = 2, CLOSED = 3 };

class Link : public MessageSink, public std::enable_shared_from_this<Link> {
public:
    Link(std::shared_ptr<Queue> queue, LinkParams params);
    ~Link() override;

    // --- any thread ---
    Queue &queue() const { return *queue_; }
    uint64_t id() const { return params_.id; }
    LinkState state() const { return LinkState(state_.load(std::memory_order_acquire)); }
    // Starts connecting and waits. Throws Failure (UCS_ERR_TIMED_OUT after timeout_ns).
    void connect(int64_t timeout_ns);
    // Null when the link is lost or closed.
    WritePtr begin(uint64_t write_id, uint64_t room);
    // GB/s of puts (or gets) of `num_bytes` between `local` and the receiver's scratch memory. Waits; throws Failure.
    double probe(MemoryPtr local, int64_t num_bytes, bool is_write, int64_t timeout_ns);
    // Stops posting, flushes, closes. Waits until nothing is on its way from here.
    void close();
    // Valid after connect.
    const std::string &transports() const { return transports_; }
    const std::string &info() const { return info_; }
    Path path() const { return path_; }
    uint32_t num_doorbells() const { return params_.num_doorbells; }
    std::string failure_text() const;

    // --- the queue's thread ---
    void open();
    void on_message(const MessageHeader &header, const char *payload, size_t num_bytes) override;
    // Of the link's own worker, if it has one.
    bool progress() { return own_worker_ && own_worker_->progress() != 0; }
    bool arm() { return !own_worker_ || own_worker_->arm(); }
    void start_closing();
    bool is_closing() const { return closing_; }
    void look_at(const WritePtr &write);
    // Posts what may be posted now. True when it did something.
    bool pump();
    void fail(ucs_status_t status, const std::string &text);
    void peer_process_ended();
    bool is_waiting_for_event() const { return !gated_.empty() || !launches_.empty(); }
    bool has_in_flight() const { return in_flight_ > 0; }
    bool is_over() const { return state() == LinkState::CLOSED; }
    int pidfd() const { return params_.pidfd; }

private:
    friend class Probe;
    static void on_put(void *request, ucs_status_t status, void *write);
    static void on_flush(void *request, ucs_status_t status, void *write);
    void flushed(Write &write, ucs_status_t status);
    void end_with_doorbell(Write &write);

    void greet();
    void say_hello();
    void be_welcomed();
    void become_ready();
    bool admit_writer();
    bool try_gated();
    void wait_for_event(const WritePtr &write);
    void advance(const WritePtr &write);
    void take_incoming(Write &write);
    bool post_turn(Write &write);
    bool post_some(Write &write);
    void map_device();
    bool launch_some(Write &write);
    void launch(const std::vector<Span> &tiles, uint64_t source, uint64_t destination, WritePtr write);
    bool take_ended_launches();
    Span next_piece(Batch &batch, int64_t max_bytes);
    void put(Write &write, const Span &piece);
    void start_flush(Write &write);
    void ring_doorbell(Write &write);
    void ask(Write &write, MessageKind kind);
    MessageHeader header(MessageKind kind) const;
    void put_done(Write &write, ucs_status_t status);
    void finalize(const WritePtr &write, WriteState state, int status, const std::string &text);
    void run_again(const WritePtr &write);
    bool close_step();
    void leave_ucx();
    bool settle();
    void shut();

    const std::shared_ptr<Queue> queue_;
    LinkParams params_;
    const int64_t source_bytes_;
    std::atomic<int> state_{int(LinkState::CONNECTING)};
    std::string transports_, info_, failure_;
    int failure_status_ = 0;
    Path path_ = Path::PUTS;
    mutable std::mutex mutex_; // for waiters, and begin against close
    std::condition_variable changed_;
    bool refusing_ = false;         // begin says no (guarded by mutex_)
    bool closing_ = false;          // of the queue's thread
    int64_t close_deadline_ns_ = 0; // of the queue's thread

    // Over a network. It goes with the endpoint: after an endpoint was closed by force (a peer that hangs), UCX 1.22's tcp may still get events for it.
    std::unique_ptr<Worker> own_worker_;
    std::unique_ptr<Endpoint> endpoint_;
    RemoteMemory pool_, table_, bell_, scratch_;
    TableHeader *header_ = nullptr; // in the receiver's memory, when mapped
    bool counted_ = false;          // as opened in the header
    bool is_welcome_ = false;       // the receiver answered the greeting
    uint64_t num_written_ = 0;      // messages of kind WRITE
    std::unordered_map<uint64_t, WritePtr> awaiting_ack_; // by ticket
    uint64_t next_ticket_ = 1;
    int in_flight_ = 0;
    std::unordered_map<uint64_t, WritePtr> open_;
    std::deque<WritePtr> runnable_;
    std::vector<WritePtr> gated_;
    std::unique_ptr<CudaMapping> device_pool_, device_scratch_;
    std::unique_ptr<Scatter> scatter_;
    std::deque<WritePtr> launches_; // in flight; null: of the probe
    std::shared_ptr<Probe> probe_;
};

using LinkPtr = std::shared_ptr<Link>;

} // namespace baton
