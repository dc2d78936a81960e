// Active messages, stored by the receiver's thread: for tcp, which has no puts.
#include "link.hpp"
#include "path.hpp"
#include "probe.hpp"

#include <algorithm>
#include <unordered_map>

namespace baton {

namespace {

constexpr uint64_t PROBE_TICKET = ~0ull; // of the probe under way; writes count from 1
constexpr int PROBE_WINDOW = 16;

class MessagesPath : public PiecewisePath {
public:
    explicit MessagesPath(Link &link) : PiecewisePath(link, MESSAGE_BYTES) {}

    ~MessagesPath() override {
        for (const auto &entry : awaiting_) {
            entry.second->end_operation(); // no answer will come
        }
    }

    PathKind kind() const override { return PathKind::MESSAGES; }
    std::string transports() const override { return connection().endpoint().transports(); }

    void flush(Write &write) override { ask(write, MessageKind::FLUSH, nullptr, 0); }
    // The receiver itself rings after the last write, which saves a round trip.
    void ring(Write &write) override { ask(write, MessageKind::RING, &write.record(), sizeof(Record)); }
    bool rings_in_order() const override { return true; }

    void on_message(const MessageHeader &header, const char *payload, size_t num_bytes, Probe *probe) override {
        if (header.kind == MessageKind::DATA && header.ticket == PROBE_TICKET && probe) {
            probe->arrived(int64_t(header.offset), payload, num_bytes);
        } else if (header.kind == MessageKind::ACK && header.ticket == PROBE_TICKET && probe) {
            probe->flush_ended(UCS_OK);
        } else if (header.kind == MessageKind::ACK) {
            const auto found = awaiting_.find(header.ticket);
            if (found != awaiting_.end()) {
                const WritePtr write = found->second;
                awaiting_.erase(found);
                link_.flushed(*write, UCS_OK);
            }
        }
    }

    // Pulls are told apart by their bytes only: one at a time.
    bool has_room_for_probe(int outstanding, bool is_write) const override { return outstanding < (is_write ? PROBE_WINDOW : 1); }

    void post(Probe &probe) override {
        if (!probe.is_write()) {
            MessageHeader pull = connection().header(MessageKind::PULL);
            pull.number = uint64_t(probe.num_bytes());
            pull.ticket = PROBE_TICKET;
            probe.begin_operation();
            connection().send(pull);
            return;
        }
        for (int64_t offset = 0; offset < probe.num_bytes(); offset += MESSAGE_BYTES) {
            const auto num_bytes = size_t(std::min(MESSAGE_BYTES, probe.num_bytes() - offset));
            probe.begin_operation();
            send_message(connection().endpoint().handle(), next_write(Target::SCRATCH, offset), probe.local() + offset, num_bytes,
                         probe.memory().handle(), [&probe](ucs_status_t status) { probe.operation_ended(status); });
        }
    }

    void flush(Probe &probe) override {
        MessageHeader ask = connection().header(MessageKind::FLUSH);
        ask.number = num_written_;
        ask.ticket = PROBE_TICKET;
        probe.begin_operation();
        connection().send(ask);
    }

protected:
    void put(Write &write, const Span &piece) override {
        const char *from = reinterpret_cast<const char *>(link_.source().address()) + piece.source;
        link_.put_begins(write);
        Link &link = link_; // it outlives this path
        send_message(connection().endpoint().handle(), next_write(Target::POOL, piece.destination), from, size_t(piece.length),
                     link_.source().handle(), [&link, &write](ucs_status_t status) { link.put_done(write, status); });
    }

private:
    Connection &connection() const { return link_.connection(); }

    MessageHeader next_write(Target target, int64_t offset) {
        MessageHeader header = connection().header(MessageKind::WRITE);
        header.target = target;
        header.offset = uint64_t(offset);
        ++num_written_;
        return header;
    }

    // The receiver answers when it has stored all writes before; for RING it stores the doorbell then.
    void ask(Write &write, MessageKind kind, const void *payload, size_t num_bytes) {
        MessageHeader header = connection().header(kind);
        header.number = num_written_;
        header.ticket = next_ticket_++;
        header.offset = write.slot();
        awaiting_.emplace(header.ticket, write.shared_from_this());
        connection().send(header, payload, num_bytes);
    }

    uint64_t num_written_ = 0;
    uint64_t next_ticket_ = 1;
    std::unordered_map<uint64_t, WritePtr> awaiting_; // by ticket
};

} // namespace

std::unique_ptr<Path> make_messages_path(Link &link) { return std::make_unique<MessagesPath>(link); }

} // namespace baton
