#include "message.hpp"

#include <cstring>
#include <string>

namespace baton {

namespace {

struct Outgoing {
    MessageHeader header;
    OnSent on_sent;
    std::string copy;
};

ucs_status_t on_arrival(void *argument, const void *header, size_t header_length, void *data, size_t length, const ucp_am_recv_param_t *params) {
    auto *sink = static_cast<MessageSink *>(argument);
    const bool whole = !(params->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV);
    if (sink && whole && header_length == sizeof(MessageHeader)) {
        MessageHeader copy;
        std::memcpy(&copy, header, sizeof(copy));
        sink->on_message(copy, static_cast<const char *>(data), length);
    }
    return UCS_OK;
}

void on_completion(void *request, ucs_status_t status, void *argument) {
    ucp().ucp_request_free(request);
    std::unique_ptr<Outgoing> outgoing(static_cast<Outgoing *>(argument));
    outgoing->on_sent(status);
}

void send(std::unique_ptr<Outgoing> outgoing, ucp_ep_h endpoint, const void *payload, size_t num_bytes, ucp_mem_h memory) {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_AM_SEND_FLAG_EAGER;
    params.cb.send = on_completion;
    params.user_data = outgoing.get();
    if (memory) {
        params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        params.memh = memory;
    }
    ucs_status_ptr_t request = ucp().ucp_am_send_nbx(endpoint, MESSAGE_ID, &outgoing->header, sizeof(MessageHeader), payload, num_bytes, &params);
    if (UCS_PTR_IS_PTR(request)) {
        outgoing.release(); // on_completion has it
    } else {
        outgoing->on_sent(UCS_PTR_STATUS(request));
    }
}

} // namespace

ucs_status_t listen(ucp_worker_h worker, MessageSink *sink) {
    ucp_am_handler_param_t params{};
    params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    params.id = MESSAGE_ID;
    params.cb = on_arrival;
    params.arg = sink;
    return ucp().ucp_worker_set_am_recv_handler(worker, &params);
}

void send_message(ucp_ep_h endpoint, const MessageHeader &header, const void *payload, size_t num_bytes, ucp_mem_h memory, OnSent on_sent) {
    send(std::make_unique<Outgoing>(Outgoing{header, std::move(on_sent), {}}), endpoint, payload, num_bytes, memory);
}

ucs_status_t send_now(ucp_ep_h endpoint, const MessageHeader &header, const void *payload, size_t num_bytes) {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL;
    params.flags = UCP_AM_SEND_FLAG_EAGER;
    return UCS_PTR_STATUS(ucp().ucp_am_send_nbx(endpoint, MESSAGE_ID, &header, sizeof(MessageHeader), payload, num_bytes, &params));
}

void send_copy(ucp_ep_h endpoint, const MessageHeader &header, const void *payload, size_t num_bytes) {
    auto outgoing = std::make_unique<Outgoing>(Outgoing{header, [](ucs_status_t) {}, std::string(static_cast<const char *>(payload), num_bytes)});
    const void *copy = outgoing->copy.data();
    send(std::move(outgoing), endpoint, copy, num_bytes, nullptr);
}

} // namespace baton
