// The receiver's device memory is mapped: one launch of a kernel stores the scattered pages of a whole batch, copies its long runs.
#include "cuda.hpp"
#include "failure.hpp"
#include "link.hpp"
#include "path.hpp"
#include "probe.hpp"
#include "scatter.hpp"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <numeric>
#include <vector>

namespace baton {

namespace {

constexpr int PROBE_WINDOW = 4;
constexpr size_t MAX_RUNS = 64; // of one launch: a cancelled write waits for what was launched

class KernelPath : public Path {
public:
    explicit KernelPath(Link &link) : link_(link), pool_(link.params().device_pool) {
        if (!link.params().device_scratch.empty()) {
            scratch_ = std::make_unique<CudaMapping>(link.params().device_scratch);
        }
    }

    PathKind kind() const override { return PathKind::KERNEL; }
    std::string transports() const override { return "cuda_ipc_kernel"; }

    bool post(Write &write) override {
        std::vector<Span> tiles, runs;
        while (scatter_.has_room() && write.has_piece() && tiles.size() < Scatter::MAX_TILES && runs.size() < MAX_RUNS) {
            const bool is_run = write.next_bytes() >= Scatter::COPY_BYTES;
            std::vector<Span> &kind = is_run ? runs : tiles;
            kind.push_back(write.take_piece(is_run ? INT64_MAX : Scatter::TILE_BYTES));
        }
        if (!tiles.empty() || !runs.empty()) {
            for (const Span &run : runs) {
                write.count_put(run.length);
            }
            if (!tiles.empty()) {
                write.count_put(std::accumulate(tiles.begin(), tiles.end(), int64_t(0), [](int64_t sum, const Span &tile) { return sum + tile.length; }));
            }
            write.begin_operation();
            if (launch(tiles, runs, link_.source().address(), pool_.address())) {
                launches_.push_back({write.shared_from_this(), nullptr});
            } else {
                write.end_operation();
            }
        }
        return write.has_piece();
    }

    // The link goes on when no launch of the write is outstanding.
    void flush(Write &write) override { link_.flushed(write, UCS_OK); }

    void ring(Write &write) override {
        link_.connection().ring(write.slot(), write.record());
        link_.flushed(write, UCS_OK);
    }

    bool has_room_for_probe(int outstanding, bool) const override { return outstanding < PROBE_WINDOW && scatter_.has_room(); }

    void post(Probe &probe) override {
        if (!scratch_) {
            probe.fail(UCS_ERR_UNREACHABLE, "the receiver's scratch memory cannot be mapped");
            return;
        }
        std::vector<Span> tiles, runs;
        if (probe.num_bytes() >= Scatter::COPY_BYTES) {
            runs.push_back({0, 0, probe.num_bytes()});
        }
        for (int64_t offset = 0; runs.empty() && offset < probe.num_bytes(); offset += Scatter::TILE_BYTES) {
            tiles.push_back({offset, offset, std::min(Scatter::TILE_BYTES, probe.num_bytes() - offset)});
        }
        const uint64_t local = probe.memory().address(), remote = scratch_->address();
        probe.begin_operation();
        if (probe.is_write() ? launch(tiles, runs, local, remote) : launch(tiles, runs, remote, local)) {
            launches_.push_back({nullptr, &probe});
        } else {
            probe.operation_ended(UCS_ERR_IO_ERROR);
        }
    }

    void flush(Probe &probe) override { probe.finish(); } // all its launches have ended

    bool progress() override {
        size_t count = 0;
        try {
            count = launches_.empty() ? 0 : scatter_.ended();
        } catch (const Failure &failure) {
            link_.fail(UCS_ERR_IO_ERROR, failure.function() + ": " + failure.what());
            count = launches_.size(); // their ends cannot be learnt any more; ~Scatter waits for the device, and no write fails before that
        }
        for (size_t i = 0; i < count; ++i) {
            const Launch launch = launches_.front();
            launches_.pop_front();
            launch.probe ? launch.probe->operation_ended(UCS_OK) : link_.operation_ended(*launch.write);
        }
        return count > 0;
    }

    bool needs_progress() const override { return !launches_.empty(); }

private:
    struct Launch {
        WritePtr write;
        Probe *probe; // or this one's, which outlives its operations
    };

    bool launch(const std::vector<Span> &tiles, const std::vector<Span> &runs, uint64_t source, uint64_t destination) {
        try {
            scatter_.launch(tiles, runs, source, destination);
            return true;
        } catch (const Failure &failure) {
            link_.fail(UCS_ERR_IO_ERROR, failure.function() + ": " + failure.what());
            return false;
        }
    }

    Link &link_;
    CudaMapping pool_; // unmapped after the kernels have ended
    std::unique_ptr<CudaMapping> scratch_;
    Scatter scatter_;
    std::deque<Launch> launches_; // in flight, in order
};

} // namespace

std::unique_ptr<Path> make_kernel_path(Link &link) { return std::make_unique<KernelPath>(link); }

} // namespace baton
