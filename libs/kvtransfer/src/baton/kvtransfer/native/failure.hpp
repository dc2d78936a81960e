// Errors of the core: what failed, UCX's status, UCX's word for it. The binding turns them into Python's UCXError.
#pragma once

#include <ucs/type/status.h>

#include <stdexcept>
#include <string>

namespace baton {

class Failure : public std::runtime_error {
public:
    Failure(std::string function, int status, const std::string &reason)
        : std::runtime_error(reason), function_(std::move(function)), status_(status) {}

    const std::string &function() const { return function_; }
    int status() const { return status_; }

private:
    std::string function_;
    int status_;
};

// Throws when `status` is an error.
void check(const char *function, ucs_status_t status);

// Throws with errno's text.
[[noreturn]] void fail_errno(const char *function);

} // namespace baton
