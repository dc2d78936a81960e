// How the bytes of one link get into the receiver's memory: four ways, chosen when the link is connected. Used by the queue's thread only.
#pragma once

#include "message.hpp"
#include "write.hpp"

#include <memory>
#include <string>

namespace baton {

class Link;
class Probe;

enum class PathKind : int {
    STORES = 0,   // the receiver's memory is mapped here: plain stores
    PUTS = 1,     // the transport has puts of its own (cma, CUDA IPC, RDMA)
    MESSAGES = 2, // it has none (tcp): see message.hpp
    KERNEL = 3,   // the receiver's device memory is mapped here: a kernel stores into it
};

class Path {
public:
    virtual ~Path() = default;
    virtual PathKind kind() const = 0;
    // What the writes really go over, for people.
    virtual std::string transports() const = 0;

    // One turn of `write`, a quantum at most. True: it has more to post.
    virtual bool post(Write &write) = 0;
    // Everything posted so far is to be in place: then, or at once, Link::flushed is called, which ends the operation that the link began.
    virtual void flush(Write &write) = 0;
    // The sealed record goes into its slot, and whoever waits for it is woken; then Link::flushed as above.
    virtual void ring(Write &write) = 0;
    // Whether `ring` comes after everything posted without a flush before it.
    virtual bool rings_in_order() const { return false; }
    // A write is DONE: nothing of it is outstanding.
    virtual void done() {}

    // Whether a put of a probe may be posted now, `outstanding` being under way.
    virtual bool has_room_for_probe(int outstanding, bool is_write) const = 0;
    virtual void post(Probe &probe) = 0;
    virtual void flush(Probe &probe) = 0;

    // Looks for ends that no callback tells of. True when there was one.
    virtual bool progress() { return false; }
    // Whether something is under way whose end only `progress` finds.
    virtual bool needs_progress() const { return false; }
    // Answers of the receiver. `probe` may be null.
    virtual void on_message(const MessageHeader &header, const char *payload, size_t num_bytes, Probe *probe) {}
};

// Posts piece by piece.
class PiecewisePath : public Path {
public:
    bool post(Write &write) override;

protected:
    PiecewisePath(Link &link, int64_t max_piece_bytes) : link_(link), max_piece_bytes_(max_piece_bytes) {}
    virtual void put(Write &write, const Span &piece) = 0;

    Link &link_;

private:
    const int64_t max_piece_bytes_;
};

// Each of a link that outlives it and is connected. Throw Failure.
std::unique_ptr<Path> make_stores_path(Link &link);
std::unique_ptr<Path> make_puts_path(Link &link);
std::unique_ptr<Path> make_messages_path(Link &link);
std::unique_ptr<Path> make_kernel_path(Link &link);

} // namespace baton
