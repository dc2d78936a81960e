// One-sided puts of UCX over a transport that has them; a flush before the doorbell, and one after it.
#include "link.hpp"
#include "path.hpp"
#include "probe.hpp"

namespace baton {

namespace {

constexpr int PROBE_WINDOW = 16;

template <typename Owner> ucp_request_param_t told_to(ucp_send_nbx_callback_t callback, Owner &owner) {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.cb.send = callback;
    params.user_data = &owner;
    return params;
}

void with_memory(ucp_request_param_t &params, const Memory &memory) {
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    params.memh = memory.handle();
    params.memory_type = memory.type();
}

void on_put(void *request, ucs_status_t status, void *user) {
    ucp().ucp_request_free(request);
    auto *write = static_cast<Write *>(user);
    write->link().put_done(*write, status);
}

void on_flush(void *request, ucs_status_t status, void *user) {
    ucp().ucp_request_free(request);
    auto *write = static_cast<Write *>(user);
    write->link().flushed(*write, status);
}

void on_probe(void *request, ucs_status_t status, void *user) {
    ucp().ucp_request_free(request);
    static_cast<Probe *>(user)->operation_ended(status);
}

void on_probe_flush(void *request, ucs_status_t status, void *user) {
    ucp().ucp_request_free(request);
    static_cast<Probe *>(user)->flush_ended(status);
}

class PutsPath : public PiecewisePath {
public:
    explicit PutsPath(Link &link) : PiecewisePath(link, link.params().max_put_bytes) {}

    PathKind kind() const override { return PathKind::PUTS; }
    std::string transports() const override { return connection().endpoint().transports(); }

    void flush(Write &write) override {
        ucp_request_param_t params = told_to(on_flush, write);
        ucs_status_ptr_t request = ucp().ucp_ep_flush_nbx(connection().endpoint().handle(), &params);
        if (!UCS_PTR_IS_PTR(request)) {
            link_.flushed(write, UCS_PTR_STATUS(request));
        }
    }

    void ring(Write &write) override {
        if (connection().is_mapped()) {
            connection().ring(write.slot(), write.record());
            link_.flushed(write, UCS_OK);
            return;
        }
        const RemoteMemory &table = connection().table();
        const uint64_t address = table.address() + sizeof(TableHeader) + uint64_t(write.slot()) * sizeof(Slot);
        link_.put_begins(write);
        ucp_request_param_t params = told_to(on_put, write);
        ucs_status_ptr_t request =
            ucp().ucp_put_nbx(connection().endpoint().handle(), &write.record(), sizeof(Record), address, table.key(), &params);
        if (!UCS_PTR_IS_PTR(request)) {
            link_.put_done(write, UCS_PTR_STATUS(request));
        }
        flush(write);
    }

    // The receiver's thread looks at its doorbells when something arrives that UCX tells of; a put is not.
    void done() override {
        if (!connection().is_mapped()) {
            connection().send(connection().header(MessageKind::KICK));
        }
    }

    bool has_room_for_probe(int outstanding, bool) const override { return outstanding < PROBE_WINDOW; }

    void post(Probe &probe) override {
        ucp_request_param_t params = told_to(on_probe, probe);
        with_memory(params, probe.memory());
        const auto endpoint = connection().endpoint().handle();
        const RemoteMemory &remote = connection().scratch();
        const auto num_bytes = size_t(probe.num_bytes());
        probe.begin_operation();
        ucs_status_ptr_t request = probe.is_write() ? ucp().ucp_put_nbx(endpoint, probe.local(), num_bytes, remote.address(), remote.key(), &params)
                                                    : ucp().ucp_get_nbx(endpoint, probe.local(), num_bytes, remote.address(), remote.key(), &params);
        if (!UCS_PTR_IS_PTR(request)) {
            probe.operation_ended(UCS_PTR_STATUS(request));
        }
    }

    void flush(Probe &probe) override {
        ucp_request_param_t params = told_to(on_probe_flush, probe);
        probe.begin_operation();
        ucs_status_ptr_t request = ucp().ucp_ep_flush_nbx(connection().endpoint().handle(), &params);
        if (!UCS_PTR_IS_PTR(request)) {
            probe.flush_ended(UCS_PTR_STATUS(request));
        }
    }

protected:
    void put(Write &write, const Span &piece) override {
        const char *from = reinterpret_cast<const char *>(link_.source().address()) + piece.source;
        const RemoteMemory &pool = connection().pool();
        ucp_request_param_t params = told_to(on_put, write);
        with_memory(params, link_.source());
        link_.put_begins(write);
        ucs_status_ptr_t request = ucp().ucp_put_nbx(connection().endpoint().handle(), from, size_t(piece.length),
                                                     pool.address() + uint64_t(piece.destination), pool.key(), &params);
        if (!UCS_PTR_IS_PTR(request)) {
            link_.put_done(write, UCS_PTR_STATUS(request));
        }
    }

private:
    Connection &connection() const { return link_.connection(); }
};

} // namespace

std::unique_ptr<Path> make_puts_path(Link &link) { return std::make_unique<PutsPath>(link); }

} // namespace baton
