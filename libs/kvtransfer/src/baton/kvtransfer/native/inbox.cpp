#include "inbox.hpp"

#include "failure.hpp"

namespace baton {

namespace {

MemoryPtr make_table(const ContextPtr &shared, size_t num_bytes) {
    return shared ? Memory::allocate_shared(shared, num_bytes) : Memory::allocate_private(num_bytes);
}

} // namespace

Inbox::Inbox(uint64_t id, uint64_t nonce, uint32_t num_doorbells, const ContextPtr &shared, const NetworkWay &network)
    : id_(id), nonce_(nonce),
      table_(make_table(shared, sizeof(TableHeader) + size_t(num_doorbells) * sizeof(Slot))), armed_(num_doorbells) {
    auto *memory = reinterpret_cast<char *>(table_->address());
    std::memset(memory, 0, table_->num_bytes()); // small memory may come from a heap
    header_ = reinterpret_cast<TableHeader *>(memory);
    slots_ = reinterpret_cast<Slot *>(memory + sizeof(TableHeader));
    header_->magic = TABLE_MAGIC;
    header_->nonce = nonce;
    if (shared) {
        shared_worker_ = std::make_unique<Worker>(shared);
        shared_address_ = shared_worker_->address();
    }
    if (network.pool) {
        open_network(network);
    }
    for (uint32_t slot = num_doorbells; slot > 0; --slot) {
        free_.push_back(slot - 1);
    }
}

void Inbox::open_network(const NetworkWay &network) {
    const ContextPtr &context = network.pool->context();
    network_table_ = Memory::also_in(context, table_);
    network_table_key_ = network_table_->pack_key();
    network_bell_ = network.bell;
    worker_ = std::make_unique<Worker>(context);
    network_address_ = worker_->address();
    event_fd_ = worker_->event_fd();
    auto store = [this](uint64_t slot, const char *bytes) { return store_record(slot, bytes); };
    writers_ = std::make_unique<Writers>(*worker_, nonce_, network.pool, network.scratch, store);
}

int Inbox::arm(uint64_t room, uint32_t generation) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_shut_) {
        return SHUT;
    }
    if (free_.empty()) {
        return FULL;
    }
    const uint32_t slot = free_.back();
    free_.pop_back();
    slots_[slot].clear();
    armed_[slot] = {room, generation, true, true, open_.size(), 0};
    open_.push_back(slot);
    num_armed_.fetch_add(1, std::memory_order_relaxed);
    return int(slot);
}

bool Inbox::disarm(uint32_t slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (slot >= armed_.size() || !armed_[slot].is_armed) {
        return false;
    }
    if (armed_[slot].is_open) {
        stop_waiting(slot);
    }
    armed_[slot].is_armed = false;
    free_.push_back(slot);
    return true;
}

void Inbox::stop_waiting(uint32_t slot) {
    const size_t position = armed_[slot].position;
    open_[position] = open_.back();
    armed_[open_[position]].position = position;
    open_.pop_back();
    armed_[slot].is_open = false;
    num_armed_.fetch_sub(1, std::memory_order_relaxed);
}

// A doorbell that came as a message. False: no such slot.
bool Inbox::store_record(uint64_t slot, const char *bytes) {
    if (slot >= armed_.size()) {
        return false;
    }
    Record record;
    std::memcpy(static_cast<void *>(&record), bytes, sizeof(record));
    slots_[slot].store(record);
    return true;
}

bool Inbox::scan(Look look) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = open_.size(); i > 0; --i) {
        examine(open_[i - 1], look); // may remove it: the last one takes its place, which was examined already
    }
    if (rung_.empty() || told_) {
        return false;
    }
    told_ = true;
    return true;
}

void Inbox::examine(uint32_t slot, Look look) {
    Armed &armed = armed_[slot];
    const uint64_t checksum = slots_[slot].words[NUM_WORDS].load(std::memory_order_acquire);
    if (checksum == 0 || checksum == armed.last_seen) {
        return;
    }
    Record record;
    const bool whole = slots_[slot].load(record);
    if (whole && record.room == armed.room && record.generation == armed.generation && record.nonce == nonce_) {
        rung_.push_back(record);
        ++counters_.num_rung;
        counters_.num_found_by_backstop += look == Look::BACKSTOP;
        stop_waiting(slot);
        return;
    }
    if (whole) {
        ++counters_.num_stale;
        armed.last_seen = record.checksum;
    } else if (look == Look::BACKSTOP) {
        // torn for longer than a wake-up: somebody wrote what is no record
        ++counters_.num_invalid;
        armed.last_seen = checksum;
    }
}

std::vector<Record> Inbox::poll() {
    scan(Look::AWOKEN);
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Record> taken;
    taken.swap(rung_);
    told_ = false;
    return taken;
}

InboxCounters Inbox::counters() const {
    InboxCounters counters;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        counters = counters_;
    }
    std::lock_guard<std::mutex> lock(worker_mutex_);
    counters.num_invalid += writers_ ? writers_->num_invalid() : num_invalid_messages_;
    return counters;
}

bool Inbox::progress(unsigned &num_events) {
    std::lock_guard<std::mutex> lock(worker_mutex_);
    if (!worker_) {
        return false;
    }
    num_events = worker_->progress();
    const uint64_t num_unanswered = writers_ ? writers_->num_unanswered() : 0;
    num_events += writers_ && writers_->step();
    if (writers_ && writers_->num_unanswered() != num_unanswered) {
        is_unanswered_ = true;
    }
    return true;
}

bool Inbox::arm_worker() {
    std::lock_guard<std::mutex> lock(worker_mutex_);
    try {
        return !worker_ || worker_->arm();
    } catch (const Failure &) {
        return false; // cannot sleep on it, so its thread polls: slower for everyone else, but nothing is missed
    }
}

bool Inbox::list_links(std::vector<uint64_t> &links) const {
    std::unique_lock<std::mutex> lock(worker_mutex_, std::try_to_lock);
    if (lock && writers_) {
        links = writers_->links();
    }
    return lock.owns_lock();
}

std::string Inbox::link_info(uint64_t link) const {
    std::unique_lock<std::mutex> lock(worker_mutex_, std::try_to_lock);
    return lock && writers_ ? writers_->info(link) : std::string();
}

void Inbox::shut() {
    header_->fenced.store(1, std::memory_order_seq_cst);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_shut_ = true;
    }
    std::lock_guard<std::mutex> lock(worker_mutex_);
    if (writers_) {
        num_invalid_messages_ = writers_->num_invalid();
    }
    writers_.reset();
    worker_.reset();
    network_bell_.reset();
    network_table_.reset();
    shared_worker_.reset();
}

bool Inbox::has_no_writers() const {
    const uint32_t opened = header_->opened.load(std::memory_order_seq_cst);
    return header_->closed.load(std::memory_order_seq_cst) == opened;
}

} // namespace baton
