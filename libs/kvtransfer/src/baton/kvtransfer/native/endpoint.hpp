// A UCP endpoint and the remote keys that came with the invitation. Used by its queue's thread only.
#pragma once

#include "worker.hpp"

#include <functional>
#include <string>

namespace baton {

// Memory of the receiver: where it is, and the packed key for it.
struct Window {
    uint64_t address = 0;
    uint64_t num_bytes = 0;
    std::string key;
};

class RemoteMemory {
public:
    RemoteMemory() = default;
    RemoteMemory(ucp_ep_h endpoint, const Window &window);
    ~RemoteMemory();
    RemoteMemory(RemoteMemory &&other) noexcept;
    RemoteMemory &operator=(RemoteMemory &&other) noexcept;

    uint64_t address() const { return address_; }
    uint64_t num_bytes() const { return num_bytes_; }
    ucp_rkey_h key() const { return key_; }
    // Where this process can store into it directly; null when it cannot.
    char *mapped() const { return mapped_; }
    // What it is mapped through: "sysv" or "posix".
    std::string mapping() const;
    // Where it is mapped, throws Failure unless all of it lies in shared memory: an invitation that says more than there is must not make this process
    // write beyond.
    void require_mapped_whole() const;

private:
    uint64_t address_ = 0;
    uint64_t num_bytes_ = 0;
    ucp_rkey_h key_ = nullptr;
    char *mapped_ = nullptr;
};

class Endpoint {
public:
    using OnError = std::function<void(ucs_status_t)>;

    // peer_errors: UCX watches the peer (network transports). Without it shared memory may be used, and death is learnt elsewhere.
    Endpoint(Worker &worker, const std::string &address, bool peer_errors, OnError on_error);
    ~Endpoint();
    Endpoint(const Endpoint &) = delete;
    Endpoint &operator=(const Endpoint &) = delete;

    ucp_ep_h handle() const { return handle_; }
    // Names of the transports that UCX chose for puts, joined with "+"; all of the endpoint's where it names none for puts.
    std::string transports() const;
    // Whether the transport has puts of its own; UCX would emulate them otherwise. Final once connected.
    bool has_puts() const { return !lane_names("rma").empty(); }
    std::string info() const;

private:
    static void on_error_callback(void *self, ucp_ep_h, ucs_status_t status);
    void close();
    std::string lane_names(const std::string &word) const;

    Worker &worker_;
    bool peer_errors_;
    OnError on_error_;
    ucp_ep_h handle_ = nullptr;
};

} // namespace baton
