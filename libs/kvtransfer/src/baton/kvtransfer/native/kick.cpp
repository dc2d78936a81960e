#include "kick.hpp"

namespace baton {

namespace {

ucs_status_t on_kick(void *, const void *, size_t, void *, size_t, const ucp_am_recv_param_t *) { return UCS_OK; }

void on_sent(void *request, ucs_status_t, void *) { ucp().ucp_request_free(request); }

} // namespace

ucs_status_t accept_kicks(ucp_worker_h worker) {
    ucp_am_handler_param_t params{};
    params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB;
    params.id = KICK_ID;
    params.cb = on_kick;
    return ucp().ucp_worker_set_am_recv_handler(worker, &params);
}

void kick(ucp_ep_h endpoint) {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK;
    params.cb.send = on_sent;
    ucp().ucp_am_send_nbx(endpoint, KICK_ID, nullptr, 0, nullptr, 0, &params);
}

} // namespace baton
