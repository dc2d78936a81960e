#include "writers.hpp"

#include "copy.hpp"
#include "cuda.hpp"
#include "doorbell.hpp"
#include "failure.hpp"

#include <algorithm>

namespace baton {

Writers::Writers(Worker &worker, uint64_t nonce, MemoryPtr pool, MemoryPtr scratch, StoreRecord store_record)
    : worker_(worker), nonce_(nonce), pool_(std::move(pool)), scratch_(std::move(scratch)), store_record_(std::move(store_record)) {
    check("ucp_worker_set_am_recv_handler", listen(worker_.handle(), this));
}

Writers::~Writers() { listen(worker_.handle(), nullptr); }

void Writers::on_message(const MessageHeader &header, const char *payload, size_t num_bytes) {
    if (header.kind == MessageKind::HELLO) {
        newcomers_.push_back({header, std::string(payload, num_bytes)});
        return;
    }
    auto found = writers_.find(header.link);
    if (found == writers_.end() || header.nonce != nonce_) {
        ++num_invalid_;
        return;
    }
    Writer &writer = found->second;
    switch (header.kind) {
    case MessageKind::WRITE:
        store(writer, header, payload, num_bytes);
        break;
    case MessageKind::FLUSH:
        writer.waiting.push_back({header.number, header.ticket, false, 0, {}});
        break;
    case MessageKind::RING:
        writer.waiting.push_back({header.number, header.ticket, true, header.offset, std::string(payload, num_bytes)});
        break;
    case MessageKind::PULL:
        writer.pulls.push_back(header);
        break;
    case MessageKind::KICK:
        break;
    default:
        ++num_invalid_;
    }
}

// A write outside its target is dropped and not counted as stored, so that its room is never acknowledged.
void Writers::store(Writer &writer, const MessageHeader &header, const char *payload, size_t num_bytes) {
    const MemoryPtr &target = header.target == Target::POOL ? pool_ : scratch_;
    if (header.offset > target->num_bytes() || num_bytes > target->num_bytes() - header.offset) {
        ++num_invalid_;
        return;
    }
    if (target->type() == UCS_MEMORY_TYPE_HOST) {
        store_bytes(reinterpret_cast<char *>(target->address()) + header.offset, payload, num_bytes);
    } else {
        cuda_store(target->address() + header.offset, payload, num_bytes);
    }
    ++writer.num_stored;
}

bool Writers::step() {
    bool worked = !newcomers_.empty();
    std::vector<Newcomer> newcomers;
    newcomers.swap(newcomers_);
    for (const auto &newcomer : newcomers) {
        greet(newcomer);
    }
    for (auto entry = writers_.begin(); entry != writers_.end();) {
        if (entry->second.is_lost) {
            entry = writers_.erase(entry);
            worked = true;
        } else {
            worked |= answer(entry->first, entry->second);
            ++entry;
        }
    }
    return worked;
}

std::vector<uint64_t> Writers::links() const {
    std::vector<uint64_t> links;
    for (const auto &entry : writers_) {
        links.push_back(entry.first);
    }
    return links;
}

std::string Writers::info(uint64_t link) const {
    const auto found = writers_.find(link);
    return found == writers_.end() || !found->second.endpoint ? std::string() : found->second.endpoint->info();
}

void Writers::greet(const Newcomer &newcomer) {
    const uint64_t link = newcomer.hello.link;
    Writer &writer = writers_[link];
    if (writer.endpoint) {
        return; // Known. UCX 1.22 may send a greeting that it said it could not send at once, beside the one that it took in the end.
    }
    const bool is_welcome = newcomer.hello.nonce == nonce_;
    try {
        writer.endpoint = std::make_unique<Endpoint>(worker_, newcomer.address, true, [&writer](ucs_status_t) { writer.is_lost = true; });
    } catch (const Failure &failure) {
        writers_.erase(link); // nobody to answer: there is no way back, or its address is nonsense
        ++(failure.status() == UCS_ERR_UNREACHABLE ? num_unanswered_ : num_invalid_);
        return;
    }
    MessageHeader reply{};
    reply.kind = is_welcome ? MessageKind::WELCOME : MessageKind::REFUSED;
    reply.link = link;
    send_copy(writer.endpoint->handle(), reply);
}

bool Writers::answer(uint64_t link, Writer &writer) {
    bool worked = false;
    for (const auto &pull : writer.pulls) {
        give(link, writer, pull);
        worked = true;
    }
    writer.pulls.clear();
    auto due = [&writer](const Answer &answer) { return answer.number <= writer.num_stored; };
    for (const auto &ready : writer.waiting) {
        if (!due(ready)) {
            continue;
        }
        worked = true;
        if (ready.rings && !(ready.record.size() == sizeof(Record) && store_record_(ready.slot, ready.record.data()))) {
            ++num_invalid_;
        }
        MessageHeader ack{};
        ack.kind = MessageKind::ACK;
        ack.link = link;
        ack.ticket = ready.ticket;
        send_copy(writer.endpoint->handle(), ack);
    }
    writer.waiting.erase(std::remove_if(writer.waiting.begin(), writer.waiting.end(), due), writer.waiting.end());
    return worked;
}

void Writers::give(uint64_t link, Writer &writer, const MessageHeader &pull) {
    const uint64_t num_bytes = std::min<uint64_t>(pull.number, scratch_->num_bytes());
    for (uint64_t offset = 0; offset < num_bytes; offset += MESSAGE_BYTES) {
        MessageHeader data{};
        data.kind = MessageKind::DATA;
        data.link = link;
        data.offset = offset;
        data.ticket = pull.ticket;
        const char *from = reinterpret_cast<const char *>(scratch_->address()) + offset;
        send_message(writer.endpoint->handle(), data, from, std::min<uint64_t>(MESSAGE_BYTES, num_bytes - offset), scratch_->handle(),
                     [](ucs_status_t) {});
    }
}

} // namespace baton
