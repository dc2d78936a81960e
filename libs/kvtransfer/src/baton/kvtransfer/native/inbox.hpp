// One sender's way in: UCX workers of its own, a table of doorbells, and the word that says it is shut.
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
#include <utility>
#include <vector>

namespace baton {

struct InboxCounters {
    uint64_t num_rung = 0;
    uint64_t num_stale = 0;
    uint64_t num_invalid = 0;
    uint64_t num_found_by_backstop = 0;
};

// What an inbox needs to be reached over networks: the receiver's memory in the context of its worker. Empty: it is not.
struct NetworkWay {
    MemoryPtr pool, scratch, bell;
};

enum class Look { AWOKEN, BACKSTOP };

class Inbox {
public:
    static constexpr int FULL = -1, SHUT = -2;

    // shared: context of shared memory, null where there is none. One of the two ways at least. Throws Failure.
    Inbox(uint64_t id, uint64_t nonce, uint32_t num_doorbells, const ContextPtr &shared, const NetworkWay &network);

    uint64_t id() const { return id_; }
    uint64_t nonce() const { return nonce_; }
    const Memory &table() const { return *table_; }
    // Of the worker that is reached through shared memory; empty without.
    const std::string &shared_address() const { return shared_address_; }
    // Of the worker that is reached over networks; empty without.
    const std::string &network_address() const { return network_address_; }
    // The table's key for senders over networks; empty without.
    const std::string &network_table_key() const { return network_table_key_; }

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
    // Once for each time that somebody greeted who cannot be answered.
    bool take_unanswered() { return is_unanswered_ && is_unanswered_.exchange(false); }
    bool arm_worker();
    // -1: nothing comes over networks, or nobody watches it any more.
    int event_fd() const { return event_fd_; }
    // For who stops watching it: its number may be another's once this was shut.
    int take_event_fd() { return std::exchange(event_fd_, -1); }
    // Who is connected over a network, and UCX's description of the way back to one of them (empty: ask later). Never wait: false while the worker is
    // busy, which may be for as long as it takes to close a connection.
    bool list_links(std::vector<uint64_t> &links) const;
    std::string link_info(uint64_t link) const;
    // Destroys the workers and bars the table. Nothing of a network transport lands after this.
    void shut();
    // Where memory is shared: no writer is connected, and none will be (shut was called).
    bool has_no_writers() const;

private:
    void open_network(const NetworkWay &network);

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
    std::string shared_address_, network_address_, network_table_key_;
    int event_fd_ = -1;

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
    std::atomic<bool> is_unanswered_{false};

    mutable std::mutex worker_mutex_;
    std::unique_ptr<Worker> shared_worker_; // an address, never progressed: stores and puts need nothing of it
    MemoryPtr network_table_, network_bell_; // registered while somebody may write there
    std::unique_ptr<Worker> worker_;         // over networks
    std::unique_ptr<Writers> writers_; // before the worker in destruction
};

using InboxPtr = std::shared_ptr<Inbox>;

} // namespace baton
