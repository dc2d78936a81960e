// A UCP context: one choice of transports. Everything made from it holds it, so that it goes last.
#pragma once

#include "api.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace baton {

class Context {
public:
    using Options = std::vector<std::pair<std::string, std::string>>;

    // options: UCX settings without the UCX_ prefix. device: CUDA device whose memory is used, -1 for none.
    Context(const Options &options, int device);
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    ucp_context_h handle() const { return handle_; }
    int device() const { return device_; }

private:
    ucp_context_h handle_ = nullptr;
    int device_;
};

using ContextPtr = std::shared_ptr<Context>;

} // namespace baton
