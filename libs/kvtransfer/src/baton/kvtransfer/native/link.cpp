#include "link.hpp"

#include "bell.hpp"
#include "clock.hpp"
#include "copy.hpp"
#include "cuda.hpp"
#include "failure.hpp"
#include "queue.hpp"

#include <chrono>
#include <unistd.h>

namespace baton {

namespace {

constexpr int64_t DIRECT_PIECE_BYTES = 1 << 20; // of one uninterrupted copy: how long a cancel may wait
constexpr int64_t QUANTUM_BYTES = 4 << 20;      // of one write before the next one of the peer has its turn
constexpr int QUANTUM_PUTS = 256;
constexpr int64_t CLOSE_FLUSH_NS = 2'000'000'000;

ucp_request_param_t with_callback(ucp_send_nbx_callback_t callback, void *user) {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.send = callback;
    params.user_data = user;
    return params;
}

void with_memory(ucp_request_param_t &params, const Memory &memory) {
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    params.memh = memory.handle();
    params.memory_type = memory.type();
}

} // namespace

Link::Link(std::shared_ptr<Queue> queue, LinkParams params)
    : queue_(std::move(queue)), params_(std::move(params)), source_bytes_(params_.source->num_bytes()) {}

Link::~Link() {
    if (params_.pidfd >= 0) {
        ::close(params_.pidfd);
    }
}

void Link::connect(int64_t timeout_ns) {
    auto self = shared_from_this();
    if (!queue_->run_soon([self] {
            self->queue_->attach(self);
            self->open();
        })) {
        throw Failure("connect", UCS_ERR_CANCELED, "the agent is closed");
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return state() != LinkState::CONNECTING; })) {
        throw Failure("connect", UCS_ERR_TIMED_OUT, "no answer in time");
    }
    if (state() != LinkState::READY) {
        throw Failure("connect", failure_status_, failure_);
    }
}

WritePtr Link::begin(uint64_t write_id, uint64_t room) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refusing_ || state() != LinkState::READY) {
        return nullptr;
    }
    auto write = std::make_shared<Write>(shared_from_this(), write_id, room, source_bytes_, int64_t(params_.pool.num_bytes));
    write->touch(); // the queue learns of it, so that a lost peer fails it
    return write;
}

double Link::probe(MemoryPtr local, int64_t num_bytes, bool is_write, int64_t timeout_ns) {
    auto probe = std::make_shared<Probe>(std::move(local), num_bytes, is_write);
    auto self = shared_from_this();
    bool running = queue_->run_soon([self, probe] {
        if (self->state() != LinkState::READY || self->probe_) {
            probe->fail(UCS_ERR_BUSY, self->probe_ ? "another probe of this peer is running" : "the peer is lost or closed");
        } else {
            self->probe_ = probe;
        }
    });
    if (!running) {
        throw Failure("probe", UCS_ERR_CANCELED, "the agent is closed");
    }
    return probe->wait(timeout_ns);
}

void Link::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        refusing_ = true;
    }
    auto self = shared_from_this();
    const bool running = queue_->run_soon([self] { self->start_closing(); });
    std::unique_lock<std::mutex> lock(mutex_);
    if (running) {
        changed_.wait(lock, [this] { return state() == LinkState::CLOSED; });
    }
}

std::string Link::failure_text() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

void Link::start_closing() {
    if (closing_) {
        return;
    }
    closing_ = true;
    close_deadline_ns_ = now_ns() + CLOSE_FLUSH_NS;
    for (const auto &entry : open_) {
        entry.second->cancel_requested_ = true;
        run_again(entry.second);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    refusing_ = true;
}

void Link::open() {
    try {
        auto on_error = [this](ucs_status_t status) { fail(status, std::string("the endpoint broke: ") + status_text(status)); };
        if (!params_.same_host) {
            own_worker_ = std::make_unique<Worker>(queue_->context());
            check("ucp_worker_set_am_recv_handler", listen(own_worker_->handle(), this));
            queue_->watch_worker(*own_worker_);
        }
        Worker &worker = own_worker_ ? *own_worker_ : queue_->worker();
        endpoint_ = std::make_unique<Endpoint>(worker, params_.worker_address, !params_.same_host, on_error);
        pool_ = RemoteMemory(endpoint_->handle(), params_.pool);
        table_ = RemoteMemory(endpoint_->handle(), params_.table);
        bell_ = RemoteMemory(endpoint_->handle(), params_.bell);
        scratch_ = RemoteMemory(endpoint_->handle(), params_.scratch);
        greet();
    } catch (const Failure &failure) {
        fail(ucs_status_t(failure.status()), failure.function() + ": " + failure.what());
    }
}

void Link::greet() {
    if (!params_.same_host) {
        say_hello();
        return;
    }
    if (!table_.mapped() || !bell_.mapped()) {
        fail(UCS_ERR_UNREACHABLE, "the receiver's doorbells cannot be mapped over " + endpoint_->transports() + ": shared memory needs UCX's sysv (or posix, ucx_options TLS=sm)");
        return;
    }
    header_ = reinterpret_cast<TableHeader *>(table_.mapped());
    if (header_->magic != TABLE_MAGIC || header_->nonce != params_.nonce) {
        header_ = nullptr;
        fail(UCS_ERR_UNREACHABLE, "the invitation is stale: another inbox is at its address");
    } else if (!admit_writer()) {
        fail(UCS_ERR_REJECTED, "the inbox is fenced");
    } else {
        path_ = pool_.mapped() ? Path::STORES : Path::PUTS;
        if (!params_.device_pool.empty()) {
            map_device();
        }
        become_ready();
    }
}

void Link::say_hello() {
    const std::string address = own_worker_->address();
    send_copy(endpoint_->handle(), header(MessageKind::HELLO), address.data(), address.size());
}

MessageHeader Link::header(MessageKind kind) const {
    MessageHeader header{};
    header.kind = kind;
    header.link = id();
    header.nonce = params_.nonce;
    return header;
}

void Link::on_message(const MessageHeader &header, const char *payload, size_t num_bytes) {
    switch (header.kind) {
    case MessageKind::WELCOME:
        is_welcome_ = true; // the rest outside of UCX's progress
        break;
    case MessageKind::REFUSED:
        fail(UCS_ERR_REJECTED, "the invitation is stale: another inbox is at its address");
        break;
    case MessageKind::ACK: {
        auto found = awaiting_ack_.find(header.ticket);
        if (found != awaiting_ack_.end()) {
            WritePtr write = found->second;
            awaiting_ack_.erase(found);
            flushed(*write, UCS_OK);
        } else if (probe_) {
            probe_->acknowledged(header.ticket);
        }
        break;
    }
    case MessageKind::DATA:
        if (probe_) {
            probe_->arrived(header, payload, num_bytes);
        }
        break;
    default:
        break;
    }
}

// The connection stands, so that UCX's choice of transports is final.
void Link::be_welcomed() {
    path_ = endpoint_->has_puts() ? Path::PUTS : Path::MESSAGES;
    become_ready();
}

void Link::become_ready() {
    transports_ = path_ == Path::STORES ? pool_.mapping() : path_ == Path::KERNEL ? "cuda_ipc_kernel" : endpoint_->transports();
    info_ = endpoint_->info();
    std::lock_guard<std::mutex> lock(mutex_);
    if (state() == LinkState::CONNECTING) {
        state_.store(int(LinkState::READY), std::memory_order_release);
    }
    changed_.notify_all();
}

void Link::map_device() {
    device_pool_ = std::make_unique<CudaMapping>(params_.device_pool);
    if (!params_.device_scratch.empty()) {
        device_scratch_ = std::make_unique<CudaMapping>(params_.device_scratch);
    }
    scatter_ = std::make_unique<Scatter>();
    path_ = Path::KERNEL;
}

bool Link::admit_writer() {
    header_->opened.fetch_add(1, std::memory_order_seq_cst);
    if (header_->fenced.load(std::memory_order_seq_cst)) {
        header_->closed.fetch_add(1, std::memory_order_seq_cst);
        return false;
    }
    counted_ = true;
    return true;
}

void Link::look_at(const WritePtr &write) {
    if (write->phase_ != Write::Phase::FINAL) {
        open_.emplace(write->id(), write);
        if (closing_) {
            write->cancel_requested_ = true;
        }
    }
    write->touched_.store(false, std::memory_order_seq_cst);
    run_again(write);
}

void Link::run_again(const WritePtr &write) {
    if (!write->runnable_ && write->phase_ != Write::Phase::FINAL) {
        write->runnable_ = true;
        runnable_.push_back(write);
    }
}

bool Link::pump() {
    switch (state()) {
    case LinkState::CONNECTING:
        if (is_welcome_) {
            be_welcomed();
        }
        break;
    case LinkState::READY:
        break;
    case LinkState::LOST:
        return settle();
    case LinkState::CLOSED:
        return false;
    }
    bool worked = false;
    if (probe_) {
        worked = probe_->step(*this);
        if (probe_->is_done()) {
            probe_.reset();
        }
    }
    worked |= take_ended_launches();
    worked |= try_gated();
    for (size_t turns = runnable_.size(); turns > 0 && in_flight_ < params_.max_in_flight && state() == LinkState::READY; --turns) {
        WritePtr write = runnable_.front();
        runnable_.pop_front();
        write->runnable_ = false;
        advance(write);
        worked = true;
    }
    return close_step() || worked;
}

bool Link::try_gated() {
    if (gated_.empty()) {
        return false;
    }
    bool worked = false;
    std::vector<WritePtr> gated;
    gated.swap(gated_);
    for (const auto &write : gated) {
        write->gated_ = false;
        bool open = write->cancel_requested_;
        try {
            open = open || write->batches_.empty() || cuda_event_fired(write->batches_.front().ready_event);
        } catch (const Failure &failure) {
            write->local_error_ = failure.function() + ": " + failure.what();
            open = true;
        }
        if (open) {
            if (!write->batches_.empty()) {
                write->batches_.front().ready_event = 0;
            }
            run_again(write);
            worked = true;
        } else {
            wait_for_event(write);
        }
    }
    return worked;
}

void Link::wait_for_event(const WritePtr &write) {
    if (!write->gated_) {
        write->gated_ = true;
        gated_.push_back(write);
    }
}

void Link::take_incoming(Write &write) {
    std::lock_guard<std::mutex> lock(write.mutex_);
    while (!write.incoming_.empty()) {
        write.batches_.push_back(std::move(write.incoming_.front()));
        write.incoming_.pop_front();
    }
    write.finishing_ = write.finish_requested_;
}

// One turn of one write: posts a quantum, or takes the next step of its ending.
void Link::advance(const WritePtr &write) {
    using Phase = Write::Phase;
    if (write->phase_ == Phase::POSTING) {
        take_incoming(*write);
        const bool stop = write->cancel_requested_ || !write->local_error_.empty();
        if (stop) {
            write->batches_.clear();
        } else if (post_turn(*write)) {
            run_again(write);
            return;
        } else if (!write->batches_.empty() && write->batches_.front().ready_event) {
            wait_for_event(write);
            return;
        }
        if (stop) {
            start_flush(*write);
        } else if (write->finishing_ && write->batches_.empty()) {
            end_with_doorbell(*write);
        }
    }
    if (write->phase_ == Phase::FLUSHED) {
        if (!write->local_error_.empty()) {
            finalize(write, WriteState::FAILED, UCS_ERR_IO_ERROR, write->local_error_);
        } else if (write->cancel_requested_) {
            finalize(write, WriteState::QUIESCED, UCS_OK, "");
        } else {
            ring_doorbell(*write);
        }
    }
    if (write->phase_ == Phase::RUNG) {
        finalize(write, WriteState::DONE, UCS_OK, "");
    }
}

// Over messages the receiver itself rings after the last write, which saves a round trip; elsewhere a flush comes first.
void Link::end_with_doorbell(Write &write) {
    if (path_ != Path::MESSAGES) {
        start_flush(write);
        return;
    }
    write.record_.nonce = params_.nonce;
    seal(write.record_);
    write.phase_ = Write::Phase::RINGING;
    write.begin_operation();
    ask(write, MessageKind::RING);
}

bool Link::post_turn(Write &write) {
    switch (path_) {
    case Path::KERNEL:
        return launch_some(write);
    case Path::STORES: {
        write.begin_operation(); // of the turn: reading the clock around every small store would cost more than the store
        const bool more = post_some(write);
        write.end_operation();
        return more;
    }
    default:
        return post_some(write);
    }
}

// True when the write should have another turn; false when it has nothing to post now or waits for an event.
bool Link::post_some(Write &write) {
    const int64_t max_piece = path_ == Path::STORES ? DIRECT_PIECE_BYTES : path_ == Path::MESSAGES ? MESSAGE_BYTES : params_.max_put_bytes;
    int64_t bytes = 0;
    int puts = 0;
    while (!write.batches_.empty()) {
        Batch &batch = write.batches_.front();
        if (batch.ready_event) {
            return false;
        }
        if (bytes >= QUANTUM_BYTES || puts >= QUANTUM_PUTS || in_flight_ >= params_.max_in_flight || write.cancel_requested_ ||
            state() != LinkState::READY) {
            return true;
        }
        const Span piece = next_piece(batch, max_piece);
        put(write, piece);
        bytes += piece.length;
        ++puts;
        if (batch.next == batch.spans.size()) {
            write.batches_.pop_front();
        }
    }
    return false;
}

// As post_some, with one launch for many pieces.
bool Link::launch_some(Write &write) {
    std::vector<Span> tiles;
    int64_t bytes = 0;
    while (scatter_->has_room() && !write.batches_.empty() && !write.batches_.front().ready_event && tiles.size() < Scatter::MAX_TILES) {
        Batch &batch = write.batches_.front();
        tiles.push_back(next_piece(batch, Scatter::TILE_BYTES));
        bytes += tiles.back().length;
        if (batch.next == batch.spans.size()) {
            write.batches_.pop_front();
        }
    }
    if (!tiles.empty()) {
        if (write.num_puts_.fetch_add(1, std::memory_order_relaxed) == 0) {
            write.first_post_ns_.store(now_ns(), std::memory_order_relaxed);
        }
        write.num_bytes_.fetch_add(bytes, std::memory_order_relaxed);
        write.begin_operation();
        launch(tiles, params_.source->address(), device_pool_->address(), write.shared_from_this());
    }
    return !write.batches_.empty() && !write.batches_.front().ready_event;
}

void Link::launch(const std::vector<Span> &tiles, uint64_t source, uint64_t destination, WritePtr write) {
    launches_.push_back(std::move(write));
    try {
        scatter_->launch(tiles, source, destination);
    } catch (const Failure &failure) {
        fail(UCS_ERR_IO_ERROR, failure.function() + ": " + failure.what());
    }
}

bool Link::take_ended_launches() {
    if (launches_.empty()) {
        return false;
    }
    size_t count = 0;
    try {
        count = scatter_->ended();
    } catch (const Failure &failure) {
        fail(UCS_ERR_IO_ERROR, failure.function() + ": " + failure.what());
        count = launches_.size(); // the device does nothing for this context any more
    }
    for (size_t i = 0; i < count; ++i) {
        const WritePtr write = launches_.front();
        launches_.pop_front();
        if (!write) {
            probe_->put_done(UCS_OK);
            continue;
        }
        write->end_operation();
        if (write->phase_ == Write::Phase::FLUSHING && write->outstanding_ == 1) {
            flushed(*write, UCS_OK);
        }
    }
    return count > 0;
}

Span Link::next_piece(Batch &batch, int64_t max_bytes) {
    const Span &span = batch.spans[batch.next];
    Span piece{span.source + batch.done_of_next, span.destination + batch.done_of_next, span.length - batch.done_of_next};
    if (piece.length > max_bytes) {
        piece.length = max_bytes;
        batch.done_of_next += max_bytes;
    } else {
        ++batch.next;
        batch.done_of_next = 0;
    }
    return piece;
}

void Link::put(Write &write, const Span &piece) {
    if (write.num_puts_.fetch_add(1, std::memory_order_relaxed) == 0) {
        write.first_post_ns_.store(now_ns(), std::memory_order_relaxed);
    }
    const char *from = reinterpret_cast<const char *>(params_.source->address()) + piece.source;
    write.num_bytes_.fetch_add(piece.length, std::memory_order_relaxed);
    if (path_ == Path::STORES) {
        store_bytes(pool_.mapped() + piece.destination, from, size_t(piece.length));
        return;
    }
    write.begin_operation();
    ++in_flight_;
    if (path_ == Path::MESSAGES) {
        MessageHeader header = this->header(MessageKind::WRITE);
        header.target = Target::POOL;
        header.offset = uint64_t(piece.destination);
        ++num_written_;
        send_message(endpoint_->handle(), header, from, size_t(piece.length), params_.source->handle(),
                     [this, &write](ucs_status_t status) { put_done(write, status); });
        return;
    }
    ucp_request_param_t params = with_callback(on_put, &write);
    with_memory(params, *params_.source);
    ucs_status_ptr_t request =
        ucp().ucp_put_nbx(endpoint_->handle(), from, size_t(piece.length), pool_.address() + uint64_t(piece.destination), pool_.key(), &params);
    if (!UCS_PTR_IS_PTR(request)) {
        put_done(write, UCS_PTR_STATUS(request));
    }
}

void Link::on_put(void *request, ucs_status_t status, void *write) {
    ucp().ucp_request_free(request);
    auto *self = static_cast<Write *>(write);
    self->link_->put_done(*self, status);
}

void Link::put_done(Write &write, ucs_status_t status) {
    write.end_operation();
    --in_flight_;
    if (status != UCS_OK) {
        fail(status, std::string("a write failed: ") + status_text(status));
    }
}

// Everything posted so far is to be in place; then the phase moves on.
void Link::start_flush(Write &write) {
    const bool ringing = write.phase_ == Write::Phase::FLUSHED;
    write.phase_ = ringing ? Write::Phase::RINGING : Write::Phase::FLUSHING;
    write.begin_operation();
    if (path_ == Path::STORES) {
        store_fence();
        flushed(write, UCS_OK);
    } else if (path_ == Path::KERNEL) {
        if (write.outstanding_ == 1) {
            flushed(write, UCS_OK); // no launch of it is in flight; otherwise the last one's end flushes
        }
    } else if (path_ == Path::MESSAGES) {
        ask(write, MessageKind::FLUSH);
    } else {
        ucp_request_param_t params = with_callback(on_flush, &write);
        ucs_status_ptr_t request = ucp().ucp_ep_flush_nbx(endpoint_->handle(), &params);
        if (!UCS_PTR_IS_PTR(request)) {
            flushed(write, UCS_PTR_STATUS(request));
        }
    }
}

// The receiver answers when it has stored all writes before; for RING it stores the doorbell then.
void Link::ask(Write &write, MessageKind kind) {
    MessageHeader header = this->header(kind);
    header.number = num_written_;
    header.ticket = next_ticket_++;
    header.offset = write.slot_;
    awaiting_ack_.emplace(header.ticket, write.shared_from_this());
    const bool rings = kind == MessageKind::RING;
    send_copy(endpoint_->handle(), header, rings ? &write.record_ : nullptr, rings ? sizeof(Record) : 0);
}

void Link::on_flush(void *request, ucs_status_t status, void *write) {
    ucp().ucp_request_free(request);
    auto *self = static_cast<Write *>(write);
    self->link_->flushed(*self, status);
}

void Link::flushed(Write &write, ucs_status_t status) {
    write.end_operation();
    if (status != UCS_OK) {
        fail(status, std::string("a flush failed: ") + status_text(status));
        return;
    }
    write.phase_ = write.phase_ == Write::Phase::RINGING ? Write::Phase::RUNG : Write::Phase::FLUSHED;
    run_again(write.shared_from_this());
}

void Link::ring_doorbell(Write &write) {
    write.record_.nonce = params_.nonce;
    seal(write.record_);
    if (header_) {
        auto *slots = reinterpret_cast<Slot *>(table_.mapped() + sizeof(TableHeader));
        slots[write.slot_].store(write.record_);
        ring(*reinterpret_cast<Bell *>(bell_.mapped()));
        write.phase_ = Write::Phase::RUNG;
        return;
    }
    const uint64_t address = table_.address() + sizeof(TableHeader) + uint64_t(write.slot_) * sizeof(Slot);
    write.begin_operation();
    ++in_flight_;
    ucp_request_param_t params = with_callback(on_put, &write);
    ucs_status_ptr_t request = ucp().ucp_put_nbx(endpoint_->handle(), &write.record_, sizeof(Record), address, table_.key(), &params);
    if (!UCS_PTR_IS_PTR(request)) {
        put_done(write, UCS_PTR_STATUS(request));
    }
    start_flush(write);
}

void Link::finalize(const WritePtr &write, WriteState state, int status, const std::string &text) {
    if (write->phase_ == Write::Phase::FINAL) {
        return;
    }
    if (state == WriteState::DONE && !header_ && path_ == Path::PUTS) {
        send_copy(endpoint_->handle(), header(MessageKind::KICK));
    }
    write->phase_ = Write::Phase::FINAL;
    write->batches_.clear();
    {
        std::lock_guard<std::mutex> lock(write->mutex_);
        write->incoming_.clear();
        write->error_status_ = status;
        write->error_text_ = text;
        write->done_ns_.store(now_ns(), std::memory_order_relaxed);
        write->state_.store(int(state), std::memory_order_release);
    }
    open_.erase(write->id());
    queue_->notices().push(NoticeKind::WRITE_FINAL, write->id());
}

void Link::fail(ucs_status_t status, const std::string &text) {
    std::lock_guard<std::mutex> lock(mutex_);
    const LinkState before = state();
    if (before == LinkState::LOST || before == LinkState::CLOSED) {
        return;
    }
    failure_ = text;
    failure_status_ = status;
    state_.store(int(LinkState::LOST), std::memory_order_release);
    if (before == LinkState::READY && !closing_) {
        queue_->notices().push(NoticeKind::LINK_LOST, id());
    }
    changed_.notify_all();
}

void Link::peer_process_ended() { fail(UCS_ERR_CONNECTION_RESET, "the receiver's process has ended"); }

bool Link::close_step() {
    if (!closing_) {
        return false;
    }
    if (open_.empty() && !probe_) {
        shut();
        return true;
    }
    if (now_ns() > close_deadline_ns_) {
        fail(UCS_ERR_CANCELED, "closed before its writes could be flushed");
        return true;
    }
    return false;
}

// The link is lost: UCX gives everything up, then the writes fail. A write fails only when nothing reads its source any more.
bool Link::settle() {
    bool worked = take_ended_launches(); // a kernel that runs reads its source
    if (scatter_ && scatter_->is_idle()) {
        while (!launches_.empty()) { // those that could not be launched
            if (launches_.front()) {
                launches_.front()->end_operation();
            }
            launches_.pop_front();
        }
    }
    if (endpoint_ && launches_.empty()) {
        if (probe_) {
            probe_->fail(failure_status_, failure_text());
        }
        leave_ucx();
        worked = true;
    }
    std::vector<WritePtr> still;
    for (const auto &entry : open_) {
        still.push_back(entry.second);
    }
    for (const auto &write : still) {
        if (write->outstanding_ == 0) {
            finalize(write, WriteState::FAILED, failure_status_, failure_text());
            worked = true;
        }
    }
    if (closing_ && open_.empty()) {
        shut();
        worked = true;
    }
    return worked;
}

// Nothing of this link writes any more, and it says so in the receiver's table while that is still mapped. Then endpoint, keys and worker go, in that order:
// no request is in flight afterwards.
void Link::leave_ucx() {
    if (counted_) {
        store_fence();
        header_->closed.fetch_add(1, std::memory_order_seq_cst);
        counted_ = false;
    }
    header_ = nullptr;
    scatter_.reset();
    device_scratch_.reset();
    device_pool_.reset();
    endpoint_.reset();
    for (const auto &entry : awaiting_ack_) {
        entry.second->end_operation(); // no answer will come
    }
    awaiting_ack_.clear();
    pool_ = RemoteMemory();
    table_ = RemoteMemory();
    bell_ = RemoteMemory();
    scratch_ = RemoteMemory();
    own_worker_.reset();
}

void Link::shut() {
    runnable_.clear();
    gated_.clear();
    probe_.reset();
    leave_ucx();
    params_.source.reset();
    std::lock_guard<std::mutex> lock(mutex_);
    state_.store(int(LinkState::CLOSED), std::memory_order_release);
    changed_.notify_all();
}

} // namespace baton
