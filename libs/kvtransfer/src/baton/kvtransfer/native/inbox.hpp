// One sender's way in: a UCX worker of its own, a table of doorbells, and the word that says it is shut.
#pragma once

#include "doorbell.hpp"
#include "memory.hpp"
#include "worker.hpp"
#include "writers.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace baton {

struct InboxCounters {
    uint64_t num_rung = 0;
    uint64_t num_stale = 0;
    uint64_t num_invalid = 0;
    uint64_t num_found_by_backstop = 0;
};

enum class Look { AWOKEN, BACKSTOP };

class Inbox {
public:
    static constexpr int FULL = -1, SHUT = -2;

    // pool, scratch: where messages may be stored. has_network: senders may come over a network.
    Inbox(ContextPtr context, uint64_t id, uint64_t nonce, uint32_t num_doorbells, bool shared, bool has_network, MemoryPtr pool, MemoryPtr scratch);

    uint64_t id() const { return id_; }
    uint64_t nonce() const { return nonce_; }
    const Memory &table() const { return *table_; }
    const std::string &worker_address() const { return address_; }

    // A slot, FULL or SHUT.
    int arm(uint64_t room, uint32_t generation);
    // False: the slot is not armed.
    bool disarm(uint32_t slot);
    bool has_armed() const { return num_armed_.load(std::memory_order_relaxed) > 0; }
    // Looks at the armed doorbells. True: there is something to take that nobody was told of yet.
    bool scan(Look look);
    // Looks, and takes what has rung since the last call.
    std::vector<Record> poll();
    InboxCounters counters() const;

    // Progress of the sender's traffic; returns false when the worker was destroyed.
    bool progress(unsigned &num_events);
    bool arm_worker();
    int event_fd() const { return event_fd_; }
    // Destroys the worker and bars the table. Nothing of a network transport lands after this.
    void shut();
    // Where memory is shared: no writer is connected, and none will be (shut was called).
    bool has_no_writers() const;

private:
    struct Armed {
        uint64_t room = 0;
        uint32_t generation = 0;
        bool is_armed = false; // taken by arm, not yet disarmed
        bool is_open = false;  // still waiting for its record
        size_t position = 0;   // in open_
        uint64_t last_seen = 0;
    };
    void stop_waiting(uint32_t slot);
    void examine(uint32_t slot, Look look);
    bool store_record(uint64_t slot, const char *bytes);

    const uint64_t id_;
    const uint64_t nonce_;
    MemoryPtr table_;
    TableHeader *header_;
    Slot *slots_;
    std::string address_;
    int event_fd_;

    mutable std::mutex mutex_; // guards the doorbells
    std::vector<Armed> armed_;
    std::vector<uint32_t> free_;
    std::vector<uint32_t> open_;
    std::vector<Record> rung_;
    bool told_ = false;
    bool is_shut_ = false;
    InboxCounters counters_;
    uint64_t num_invalid_messages_ = 0;
    std::atomic<int> num_armed_{0};

    mutable std::mutex worker_mutex_;
    std::unique_ptr<Worker> worker_;
    std::unique_ptr<Writers> writers_; // before the worker in destruction
};

using InboxPtr = std::shared_ptr<Inbox>;

} // namespace baton
