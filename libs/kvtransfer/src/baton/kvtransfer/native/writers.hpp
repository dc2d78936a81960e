// The receiving end of the messages: who writes into one inbox over a network, what they still wait for, and the way back to them.
#pragma once

#include "endpoint.hpp"
#include "memory.hpp"
#include "message.hpp"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace baton {

struct Record;

// Used by one thread at a time, under the inbox's worker lock.
class Writers : public MessageSink {
public:
    using StoreRecord = std::function<bool(uint64_t slot, const char *record)>;

    Writers(Worker &worker, uint64_t nonce, MemoryPtr pool, MemoryPtr scratch, StoreRecord store_record);
    ~Writers() override;

    void on_message(const MessageHeader &header, const char *payload, size_t num_bytes) override;
    // After progress: greets newcomers, answers, buries the dead. True when it did something.
    bool step();
    uint64_t num_invalid() const { return num_invalid_; }
    // The links that are connected.
    std::vector<uint64_t> links() const;
    // UCX's description of the way back to one; empty when there is none.
    std::string info(uint64_t link) const;
    // Greetings that cannot be answered: no network device here leads back to who sent them.
    uint64_t num_unanswered() const { return num_unanswered_; }

private:
    struct Answer {
        uint64_t number; // of writes that must have been stored before
        uint64_t ticket;
        bool rings;
        uint64_t slot;
        std::string record;
    };
    struct Writer {
        std::unique_ptr<Endpoint> endpoint;
        bool is_lost = false;
        uint64_t num_stored = 0;
        std::vector<Answer> waiting;
        std::vector<MessageHeader> pulls;
    };
    struct Newcomer {
        MessageHeader hello;
        std::string address;
    };
    void store(Writer &writer, const MessageHeader &header, const char *payload, size_t num_bytes);
    void greet(const Newcomer &newcomer);
    bool answer(uint64_t link, Writer &writer);
    void give(uint64_t link, Writer &writer, const MessageHeader &pull);

    Worker &worker_;
    const uint64_t nonce_;
    MemoryPtr pool_, scratch_;
    StoreRecord store_record_;
    std::map<uint64_t, Writer> writers_;
    std::vector<Newcomer> newcomers_;
    uint64_t num_invalid_ = 0, num_unanswered_ = 0;
};

} // namespace baton
