// A UCP context: one choice of transports. Everything made from it holds it, so that it goes last.
// It keeps the list of network devices that it found when it was made: workers cannot be made from it when one of them is gone, and none of them uses
// one that came later. Who makes workers over networks takes a new context then (ucx/contexts.py).
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
    // Of this process, alive.
    static int count();

private:
    ucp_context_h handle_ = nullptr;
    int device_;
};

using ContextPtr = std::shared_ptr<Context>;

} // namespace baton
