// The kick: an empty active message after a doorbell, where the receiver's memory cannot be woken through (network transports).
// It carries nothing: the record in the doorbell is the truth. Its arrival makes the receiver's progress thread look.
#pragma once

#include "api.hpp"

namespace baton {

constexpr unsigned KICK_ID = 0xB;

ucs_status_t accept_kicks(ucp_worker_h worker);

// Best effort: a lost kick costs the backstop's delay.
void kick(ucp_ep_h endpoint);

} // namespace baton
