// What UCX and the kernel know of the way to one inbox: worker, endpoint, the receiver's windows, and the entry in its table that says that a writer
// is connected. Used by the queue's thread only.
#pragma once

#include "doorbell.hpp"
#include "endpoint.hpp"
#include "memory.hpp"
#include "message.hpp"

#include <memory>
#include <string>

namespace baton {

// What connecting needs: the invitation, and how this side wants to write.
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

class Connection {
public:
    // own: over a network, where each has its own, which goes with the endpoint: after an endpoint was closed by force (a peer that hangs), UCX 1.22's
    // tcp may still get events for it. shared: on one host. One of them is null. Throws Failure.
    Connection(const LinkParams &params, Worker *shared, std::unique_ptr<Worker> own, MessageSink *sink, Endpoint::OnError on_error);
    // Says goodbye in the receiver's table while that is mapped; then endpoint, keys and worker go. No request is in flight afterwards.
    ~Connection();
    Connection(const Connection &) = delete;
    Connection &operator=(const Connection &) = delete;

    // One host: enters the receiver's table. Over a network: sends a greeting, which will be answered; false: call again, the connection does not stand
    // yet. Throws Failure.
    bool greet();
    // Whether the receiver's doorbells are mapped here.
    bool is_mapped() const { return header_ != nullptr; }
    // Only where they are.
    void ring(uint32_t slot, const Record &record);

    MessageHeader header(MessageKind kind) const;
    void send(const MessageHeader &header, const void *payload = nullptr, size_t num_bytes = 0);

    Endpoint &endpoint() { return *endpoint_; }
    // Null on one host.
    Worker *own_worker() { return own_worker_.get(); }
    const RemoteMemory &pool() const { return pool_; }
    const RemoteMemory &table() const { return table_; }
    const RemoteMemory &scratch() const { return scratch_; }

private:
    void enter();

    const uint64_t id_;
    const uint64_t nonce_;
    const bool same_host_;
    const bool pool_on_device_, scratch_on_device_;
    std::unique_ptr<Worker> own_worker_;
    std::unique_ptr<Endpoint> endpoint_;
    RemoteMemory pool_, table_, bell_, scratch_;
    int64_t greeting_since_ns_ = 0;
    TableHeader *header_ = nullptr; // in the receiver's memory, once entered
};

} // namespace baton
