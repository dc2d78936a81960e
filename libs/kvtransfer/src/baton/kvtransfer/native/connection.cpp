#include "connection.hpp"

#include "bell.hpp"
#include "clock.hpp"
#include "copy.hpp"
#include "failure.hpp"

namespace baton {

namespace {

// What every transport that is known sends at once. Longer addresses (dozens of devices), and what does not go for so long, go as any message does.
constexpr size_t MOST_BYTES_AT_ONCE = 1024;
constexpr int64_t GREETING_PATIENCE_NS = 1'000'000'000;

} // namespace

Connection::Connection(const LinkParams &params, Worker *shared, std::unique_ptr<Worker> own, MessageSink *sink, Endpoint::OnError on_error)
    : id_(params.id), nonce_(params.nonce), same_host_(params.same_host), pool_on_device_(!params.device_pool.empty()),
      scratch_on_device_(!params.device_scratch.empty()), own_worker_(std::move(own)) {
    if (own_worker_) {
        check("ucp_worker_set_am_recv_handler", listen(own_worker_->handle(), sink));
    }
    Worker &worker = own_worker_ ? *own_worker_ : *shared;
    endpoint_ = std::make_unique<Endpoint>(worker, params.worker_address, !same_host_, std::move(on_error));
    pool_ = RemoteMemory(endpoint_->handle(), params.pool);
    table_ = RemoteMemory(endpoint_->handle(), params.table);
    bell_ = RemoteMemory(endpoint_->handle(), params.bell);
    scratch_ = RemoteMemory(endpoint_->handle(), params.scratch);
}

Connection::~Connection() {
    if (header_) {
        store_fence();
        header_->closed.fetch_add(1, std::memory_order_seq_cst);
        header_ = nullptr;
    }
    endpoint_.reset(); // members would go in another order
}

// UCX must not ask the receiver anything before the receiver has made an endpoint for the answer: where it finds no way back for it, UCX 1.22 dies of
// the question (options.py). Once it has answered, there is one.
bool Connection::greet() {
    if (same_host_) {
        enter();
        return true;
    }
    const std::string address = own_worker_->address();
    const int64_t now = now_ns();
    greeting_since_ns_ = greeting_since_ns_ ? greeting_since_ns_ : now;
    if (address.size() <= MOST_BYTES_AT_ONCE && now - greeting_since_ns_ < GREETING_PATIENCE_NS) {
        const ucs_status_t status = send_now(endpoint_->handle(), header(MessageKind::HELLO), address.data(), address.size());
        if (status != UCS_OK && status != UCS_ERR_NO_RESOURCE) {
            check("ucp_am_send_nbx", status);
        }
        return status == UCS_OK;
    }
    send(header(MessageKind::HELLO), address.data(), address.size());
    return true;
}

void Connection::enter() {
    if (!table_.mapped() || !bell_.mapped()) {
        throw Failure("connect", UCS_ERR_UNREACHABLE,
                      "the receiver's doorbells cannot be mapped over " + endpoint_->transports() +
                          ": shared memory needs UCX's sysv (or posix, ucx_options TLS=sm)");
    }
    table_.require_mapped_whole();
    bell_.require_mapped_whole();
    // Device memory lies in no file: the kernel that stores into it faults in this process's context, nowhere else, if the invitation lied.
    if (!pool_on_device_) {
        pool_.require_mapped_whole();
    }
    if (!scratch_on_device_) {
        scratch_.require_mapped_whole();
    }
    auto *header = reinterpret_cast<TableHeader *>(table_.mapped());
    if (header->magic != TABLE_MAGIC || header->nonce != nonce_) {
        throw Failure("connect", UCS_ERR_UNREACHABLE, "the invitation is stale: another inbox is at its address");
    }
    header->opened.fetch_add(1, std::memory_order_seq_cst);
    if (header->fenced.load(std::memory_order_seq_cst)) {
        header->closed.fetch_add(1, std::memory_order_seq_cst);
        throw Failure("connect", UCS_ERR_REJECTED, "the inbox is fenced");
    }
    header_ = header;
}

void Connection::ring(uint32_t slot, const Record &record) {
    auto *slots = reinterpret_cast<Slot *>(table_.mapped() + sizeof(TableHeader));
    slots[slot].store(record);
    baton::ring(*reinterpret_cast<Bell *>(bell_.mapped()));
}

MessageHeader Connection::header(MessageKind kind) const {
    MessageHeader header{};
    header.kind = kind;
    header.link = id_;
    header.nonce = nonce_;
    return header;
}

void Connection::send(const MessageHeader &header, const void *payload, size_t num_bytes) {
    send_copy(endpoint_->handle(), header, payload, num_bytes);
}

} // namespace baton
