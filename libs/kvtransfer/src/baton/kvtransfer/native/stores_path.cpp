// The receiver's pool is mapped into this process: a put is a copy.
#include "copy.hpp"
#include "link.hpp"
#include "path.hpp"
#include "probe.hpp"

namespace baton {

namespace {

constexpr int64_t PIECE_BYTES = 1 << 20; // of one uninterrupted copy: how long a cancel may wait

class StoresPath : public PiecewisePath {
public:
    explicit StoresPath(Link &link)
        : PiecewisePath(link, PIECE_BYTES), pool_(link.connection().pool().mapped()), source_(reinterpret_cast<const char *>(link.source().address())) {}

    PathKind kind() const override { return PathKind::STORES; }
    std::string transports() const override { return link_.connection().pool().mapping(); }

    bool post(Write &write) override {
        write.begin_operation(); // of the turn: reading the clock around every small store would cost more than the store
        const bool more = PiecewisePath::post(write);
        write.end_operation();
        return more;
    }

    void flush(Write &write) override {
        store_fence();
        link_.flushed(write, UCS_OK);
    }

    void ring(Write &write) override {
        link_.connection().ring(write.slot(), write.record());
        link_.flushed(write, UCS_OK);
    }

    bool has_room_for_probe(int, bool) const override { return true; }

    void post(Probe &probe) override {
        char *remote = link_.connection().scratch().mapped();
        if (!remote) {
            probe.fail(UCS_ERR_UNREACHABLE, "the receiver's scratch memory cannot be mapped");
            return;
        }
        const auto num_bytes = size_t(probe.num_bytes());
        probe.begin_operation();
        probe.is_write() ? store_bytes(remote, probe.local(), num_bytes) : store_bytes(probe.local(), remote, num_bytes);
        probe.operation_ended(UCS_OK);
    }

    void flush(Probe &probe) override {
        store_fence();
        probe.finish();
    }

protected:
    void put(Write &write, const Span &piece) override {
        const auto store = size_t(write.reach()) >= bytes_past_cache() ? stream_bytes : store_bytes;
        store(pool_ + piece.destination, source_ + piece.source, size_t(piece.length));
    }

private:
    char *const pool_;
    const char *const source_;
};

} // namespace

std::unique_ptr<Path> make_stores_path(Link &link) { return std::make_unique<StoresPath>(link); }

} // namespace baton
