#include "api.hpp"

#include "failure.hpp"
#include "routes.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <mutex>

namespace baton {

namespace {

Api functions;
LibraryInfo loaded;
std::mutex loading;
const char *(*ucs_status_string_)(ucs_status_t) = nullptr;

std::string path_of(void *symbol) {
    Dl_info info{};
    return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : "";
}

} // namespace

LibraryInfo load_library(const std::string &path) {
    std::lock_guard<std::mutex> lock(loading);
    if (!loaded.path.empty()) {
        return loaded;
    }
    LibraryInfo info;
    offer_routes();
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *words = dlerror();
        info.problem = words ? words : "unknown";
        return info;
    }
    Api found;
#define BATON_RESOLVE(name)                                                                                                                           \
    found.name = reinterpret_cast<decltype(found.name)>(dlsym(library, #name));                                                                       \
    if (!found.name) {                                                                                                                                \
        info.missing.push_back(#name);                                                                                                                \
    }
    BATON_UCP_FUNCTIONS(BATON_RESOLVE)
#undef BATON_RESOLVE
    if (found.ucp_get_version_string) {
        info.version = found.ucp_get_version_string();
        info.path = path_of(reinterpret_cast<void *>(found.ucp_get_version_string));
    }
    if (info.missing.empty()) {
        // libucs came along as libucp's dependency; dlsym on the handle searches dependencies too
        ucs_status_string_ = reinterpret_cast<const char *(*)(ucs_status_t)>(dlsym(library, "ucs_status_string"));
        know_routes_of(library);
        functions = found;
        loaded = info;
    }
    return info;
}

const Api &ucp() { return functions; }

const char *status_text(ucs_status_t status) { return ucs_status_string_ ? ucs_status_string_(status) : "unknown status"; }

void check(const char *function, ucs_status_t status) {
    if (status != UCS_OK) {
        throw Failure(function, status, status_text(status));
    }
}

void fail_errno(const char *function) { throw Failure(function, -errno, std::strerror(errno)); }

} // namespace baton
