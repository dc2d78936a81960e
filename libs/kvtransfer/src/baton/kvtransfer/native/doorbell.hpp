// The doorbell record and the inbox table around it, as they lie in memory. doorbell.py describes the same 64 bytes; a test holds the two together.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace baton {

struct Record {
    uint64_t room = 0;
    uint32_t generation = 0;
    uint32_t flags = 0; // status in the low 16 bits, bit 16: has digest
    uint32_t num_tokens = 0;
    int32_t first_token = 0;
    uint64_t digest = 0;
    uint64_t last_layer_ns = 0;
    uint64_t nonce = 0; // of the inbox
    uint64_t reserved = 0;
    uint64_t checksum = 0;
};
static_assert(sizeof(Record) == 64, "one cache line");

constexpr size_t NUM_WORDS = 7;

inline uint64_t record_checksum(const uint64_t *words) {
    uint64_t state = 0x6261746F6E4B5631ull;
    for (size_t i = 0; i < NUM_WORDS; ++i) {
        state = (state ^ words[i]) * 0x9FB21C651E98DF25ull;
        state ^= state >> 32;
    }
    return state ? state : 1;
}

inline void seal(Record &record) {
    uint64_t words[NUM_WORDS];
    std::memcpy(words, &record, sizeof(words));
    record.checksum = record_checksum(words);
}

// A slot of the table: written by another process (or its network card), read here while it may change.
struct alignas(64) Slot {
    std::atomic<uint64_t> words[NUM_WORDS + 1];

    void store(const Record &record) {
        uint64_t from[NUM_WORDS + 1];
        std::memcpy(from, &record, sizeof(from));
        for (size_t i = 0; i < NUM_WORDS; ++i) {
            words[i].store(from[i], std::memory_order_relaxed);
        }
        words[NUM_WORDS].store(from[NUM_WORDS], std::memory_order_release);
    }

    // True when what is there is a whole record.
    bool load(Record &record) const {
        uint64_t to[NUM_WORDS + 1];
        to[NUM_WORDS] = words[NUM_WORDS].load(std::memory_order_acquire);
        for (size_t i = 0; i < NUM_WORDS; ++i) {
            to[i] = words[i].load(std::memory_order_relaxed);
        }
        std::atomic_thread_fence(std::memory_order_acquire);
        std::memcpy(static_cast<void *>(&record), to, sizeof(to));
        return to[NUM_WORDS] == record_checksum(to);
    }

    void clear() {
        for (auto &word : words) {
            word.store(0, std::memory_order_relaxed);
        }
    }
};
static_assert(sizeof(Slot) == 64 && std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

constexpr uint64_t TABLE_MAGIC = 0x4241544F4E494258ull;

// First line of the table. Where memory is shared, the two counters prove that no writer is connected; `fenced` keeps later ones out. The order
// (writer: opened, then look at fenced; fence: fenced, then look at opened) makes one of the two see the other.
struct alignas(64) TableHeader {
    uint64_t magic;
    uint64_t nonce;
    std::atomic<uint32_t> fenced;
    std::atomic<uint32_t> opened;
    std::atomic<uint32_t> closed;
};
static_assert(sizeof(TableHeader) == 64, "one cache line");

// The word that wakes the receiver where memory is shared.
struct alignas(64) Bell {
    std::atomic<uint32_t> count;
};

} // namespace baton
