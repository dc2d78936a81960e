#include "context.hpp"

#include "cuda.hpp"
#include "failure.hpp"

#include <atomic>

namespace baton {

namespace {

std::atomic<int> num_alive{0};

// The oldest library that is accepted (library.py says why).
constexpr unsigned API_MAJOR = 1;
constexpr unsigned API_MINOR = 18;

ucp_config_t *read_config(const Context::Options &options) {
    ucp_config_t *config = nullptr;
    check("ucp_config_read", ucp().ucp_config_read(nullptr, nullptr, &config));
    for (const auto &option : options) {
        ucs_status_t status = ucp().ucp_config_modify(config, option.first.c_str(), option.second.c_str());
        if (status != UCS_OK) {
            ucp().ucp_config_release(config);
            throw Failure("ucp_config_modify(" + option.first + "=" + option.second + ")", status, status_text(status));
        }
    }
    return config;
}

} // namespace

Context::Context(const Options &options, int device) : device_(device) {
    if (device >= 0) {
        cuda_bind(device); // UCX drops CUDA transports silently where no CUDA context is current
    }
    ucp_config_t *config = read_config(options);
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
    params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    params.mt_workers_shared = 1;
    params.name = "baton";
    ucs_status_t status = ucp().ucp_init_version(API_MAJOR, API_MINOR, &params, config, &handle_);
    ucp().ucp_config_release(config);
    check("ucp_init", status);
    num_alive.fetch_add(1);
}

Context::~Context() {
    ucp().ucp_cleanup(handle_);
    num_alive.fetch_sub(1);
}

int Context::count() { return num_alive.load(); }

} // namespace baton
