// A UCP worker: the progress of one thread. Used by one thread at a time.
#pragma once

#include "context.hpp"

#include <string>

namespace baton {

class Worker {
public:
    explicit Worker(ContextPtr context);
    ~Worker();
    Worker(const Worker &) = delete;
    Worker &operator=(const Worker &) = delete;

    ucp_worker_h handle() const { return handle_; }
    const ContextPtr &context() const { return context_; }
    // Readable when there is something to progress, after `arm` returned true.
    int event_fd() const { return event_fd_; }
    unsigned progress() { return ucp().ucp_worker_progress(handle_); }
    // False: there is something to progress right now. Throws Failure.
    bool arm();
    std::string address() const;

private:
    ContextPtr context_;
    ucp_worker_h handle_ = nullptr;
    int event_fd_ = -1; // UCX's
};

} // namespace baton
