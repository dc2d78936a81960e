#include "endpoint.hpp"

#include "clock.hpp"
#include "failure.hpp"
#include "shared_mapping.hpp"

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <utility>

namespace baton {

namespace {

constexpr int64_t CLOSE_TIMEOUT_NS = 2'000'000'000;

void add_name(std::string &names, const std::string &name) {
    if (("+" + names + "+").find("+" + name + "+") == std::string::npos) {
        names += (names.empty() ? "" : "+") + name;
    }
}

} // namespace

RemoteMemory::RemoteMemory(ucp_ep_h endpoint, const Window &window) : address_(window.address), num_bytes_(window.num_bytes) {
    check("ucp_ep_rkey_unpack", ucp().ucp_ep_rkey_unpack(endpoint, window.key.data(), &key_));
    void *pointer = nullptr;
    if (ucp().ucp_rkey_ptr(key_, address_, &pointer) == UCS_OK) {
        mapped_ = static_cast<char *>(pointer);
    }
}

RemoteMemory::~RemoteMemory() {
    if (key_) {
        ucp().ucp_rkey_destroy(key_);
    }
}

RemoteMemory::RemoteMemory(RemoteMemory &&other) noexcept { *this = std::move(other); }

RemoteMemory &RemoteMemory::operator=(RemoteMemory &&other) noexcept {
    std::swap(address_, other.address_);
    std::swap(num_bytes_, other.num_bytes_);
    std::swap(key_, other.key_);
    std::swap(mapped_, other.mapped_);
    return *this;
}

Endpoint::Endpoint(Worker &worker, const std::string &address, bool peer_errors, OnError on_error)
    : worker_(worker), peer_errors_(peer_errors), on_error_(std::move(on_error)) {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t *>(address.data());
    params.err_mode = peer_errors ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    if (peer_errors) {
        params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params.err_handler.cb = on_error_callback;
        params.err_handler.arg = this;
    }
    check("ucp_ep_create", ucp().ucp_ep_create(worker_.handle(), &params, &handle_));
}

Endpoint::~Endpoint() { close(); }

void Endpoint::on_error_callback(void *self, ucp_ep_h, ucs_status_t status) { static_cast<Endpoint *>(self)->on_error_(status); }

void Endpoint::close() {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = peer_errors_ ? UCP_EP_CLOSE_FLAG_FORCE : 0; // forcing is allowed with peer errors only
    ucs_status_ptr_t request = ucp().ucp_ep_close_nbx(handle_, &params);
    if (!UCS_PTR_IS_PTR(request)) {
        return;
    }
    int64_t deadline = now_ns() + CLOSE_TIMEOUT_NS;
    while (ucp().ucp_request_check_status(request) == UCS_INPROGRESS && now_ns() < deadline) {
        worker_.progress();
    }
    ucp().ucp_request_free(request);
}

std::string RemoteMemory::mapping() const { return find_shared(reinterpret_cast<uint64_t>(mapped_)).kind; }

void RemoteMemory::require_mapped_whole() const {
    if (!mapped_) {
        return;
    }
    const auto address = reinterpret_cast<uint64_t>(mapped_);
    const SharedMapping mapping = find_shared(address);
    const uint64_t shared_bytes = mapping.kind.empty() ? 0 : mapping.end - address;
    if (num_bytes_ > shared_bytes) {
        throw Failure("connect", UCS_ERR_OUT_OF_RANGE,
                      "the invitation names " + std::to_string(num_bytes_) + " bytes where " + std::to_string(shared_bytes) +
                          " are shared: it is not of this receiver");
    }
}

std::string Endpoint::transports() const {
    std::string names = lane_names("rma");
    return names.empty() ? lane_names("") : names;
}

// Of the lanes whose description has `word`, as in "lane[2]:  2:cma/memory.0 md[2]  -> ... rma_bw#0".
std::string Endpoint::lane_names(const std::string &word) const {
    std::string names;
    std::istringstream lines(info());
    for (std::string line; std::getline(lines, line);) {
        const size_t slash = line.find('/');
        if (line.find("lane[") != std::string::npos && slash != std::string::npos && line.find(word, slash) != std::string::npos) {
            const size_t colon = line.rfind(':', slash);
            add_name(names, line.substr(colon + 1, slash - colon - 1));
        }
    }
    return names;
}

std::string Endpoint::info() const {
    char *text = nullptr;
    size_t length = 0;
    FILE *stream = open_memstream(&text, &length);
    if (!stream) {
        fail_errno("open_memstream");
    }
    ucp().ucp_ep_print_info(handle_, stream);
    std::fclose(stream);
    std::string info(text, length);
    std::free(text);
    return info;
}

} // namespace baton
