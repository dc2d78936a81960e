// Active messages between a sender's link and a receiver's inbox, over networks.
//
// They always carry the greeting and the kick. They carry the pages too where a transport has no puts of its own (tcp): UCX would emulate them, and its
// emulation ends the receiver's process when the sender dies at the wrong moment. These messages do the same work with bounds checked and errors told.
#pragma once

#include "api.hpp"

#include <cstdint>
#include <functional>
#include <memory>

namespace baton {

enum class MessageKind : uint32_t {
    HELLO = 1, // link -> inbox: payload is the sender's worker address, for the way back
    WELCOME,   // inbox -> link
    REFUSED,   // inbox -> link: stale or fenced
    WRITE,     // link -> inbox: payload goes to `offset` of `target`
    FLUSH,     // link -> inbox: answer `ticket` when `number` writes have been stored
    RING,      // link -> inbox: like FLUSH; then the payload, a Record, goes into doorbell `offset`
    ACK,       // inbox -> link: `ticket`
    PULL,      // link -> inbox: send `number` bytes of the scratch memory
    DATA,      // inbox -> link: the payload is `offset` of what was pulled
    KICK,      // link -> inbox: nothing; its arrival makes the progress thread look at the doorbells
};

enum class Target : uint32_t { POOL = 0, SCRATCH = 1 };

struct MessageHeader {
    MessageKind kind;
    Target target;
    uint64_t link;  // random id of the link, unique over all senders
    uint64_t nonce; // of the inbox
    uint64_t offset;
    uint64_t number;
    uint64_t ticket;
};

constexpr unsigned MESSAGE_ID = 0xB;

// Payload of one WRITE or DATA: fits one fragment of tcp, so that nothing is assembled at the receiver.
constexpr int64_t MESSAGE_BYTES = 60 << 10;

class MessageSink {
public:
    virtual ~MessageSink() = default;
    // Inside ucp_worker_progress: must neither progress nor destroy endpoints.
    virtual void on_message(const MessageHeader &header, const char *payload, size_t num_bytes) = 0;
};

// `sink` receives every message of `worker` from now on; null: they are dropped.
ucs_status_t listen(ucp_worker_h worker, MessageSink *sink);

using OnSent = std::function<void(ucs_status_t)>;

// The payload must stay until `on_sent`, which may run inside this call. Failures come through `on_sent` too.
void send_message(ucp_ep_h endpoint, const MessageHeader &header, const void *payload, size_t num_bytes, ucp_mem_h memory, OnSent on_sent);

// At once or not at all (UCS_ERR_NO_RESOURCE: the connection does not stand yet, or it is longer than a transport sends at once). UCX asks the other
// side nothing for it, as it does for a message that has to wait.
ucs_status_t send_now(ucp_ep_h endpoint, const MessageHeader &header, const void *payload, size_t num_bytes);

// The payload is copied; nobody waits for it.
void send_copy(ucp_ep_h endpoint, const MessageHeader &header, const void *payload = nullptr, size_t num_bytes = 0);

} // namespace baton
