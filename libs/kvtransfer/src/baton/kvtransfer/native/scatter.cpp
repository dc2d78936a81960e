#include "scatter.hpp"

#include "cuda_driver.hpp"
#include "failure.hpp"
#include "scatter_ptx.hpp"
#include "write.hpp"

#include <algorithm>

namespace baton {

namespace {

constexpr size_t NUM_SLOTS = 8;
constexpr unsigned THREADS = 512;
constexpr unsigned MAX_BLOCKS = 264; // two a multiprocessor of a large device: enough to fill its memory, and little beside a model's kernels
constexpr unsigned NON_BLOCKING = 1, DISABLE_TIMING = 2;
static_assert(sizeof(Span) == 24, "the kernel reads three 64-bit integers");

} // namespace

Scatter::Scatter() {
    const CudaDriver &driver = cuda_driver();
    try {
        driver.require("cuStreamCreate", driver.cuStreamCreate(&stream_, NON_BLOCKING));
        driver.require("cuModuleLoadData", driver.cuModuleLoadData(&module_, SCATTER_PTX));
        driver.require("cuModuleGetFunction", driver.cuModuleGetFunction(&kernel_, module_, "scatter"));
        slots_.resize(NUM_SLOTS);
        for (Slot &slot : slots_) {
            driver.require("cuMemHostAlloc", driver.cuMemHostAlloc(&slot.host, MAX_TILES * sizeof(Span), 0));
            driver.require("cuMemAlloc", driver.cuMemAlloc_v2(&slot.device, MAX_TILES * sizeof(Span)));
            driver.require("cuEventCreate", driver.cuEventCreate(&slot.event, DISABLE_TIMING));
        }
    } catch (const Failure &) {
        release();
        throw;
    }
}

Scatter::~Scatter() { release(); }

void Scatter::release() {
    const CudaDriver &driver = cuda_driver();
    if (stream_) {
        driver.cuStreamSynchronize(stream_); // also for a launch whose event could not be recorded: it reads the source
    }
    for (Slot &slot : slots_) {
        if (slot.event) {
            driver.cuEventDestroy_v2(slot.event);
        }
        if (slot.device) {
            driver.cuMemFree_v2(slot.device);
        }
        if (slot.host) {
            driver.cuMemFreeHost(slot.host);
        }
    }
    slots_.clear();
    if (module_) {
        driver.cuModuleUnload(module_);
    }
    if (stream_) {
        driver.cuStreamDestroy_v2(stream_);
    }
}

void Scatter::launch(const std::vector<Span> &tiles, const std::vector<Span> &runs, uint64_t source, uint64_t destination) {
    const CudaDriver &driver = cuda_driver();
    Slot &slot = slots_[(first_ + in_flight_) % slots_.size()];
    for (const Span &run : runs) {
        driver.require("cuMemcpyDtoDAsync",
                       driver.cuMemcpyDtoDAsync_v2(destination + run.destination, source + run.source, size_t(run.length), stream_));
    }
    if (!tiles.empty()) {
        std::copy(tiles.begin(), tiles.end(), static_cast<Span *>(slot.host));
        driver.require("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync_v2(slot.device, slot.host, tiles.size() * sizeof(Span), stream_));
        uint32_t count = uint32_t(tiles.size());
        void *parameters[] = {&slot.device, &count, &source, &destination};
        driver.require("cuLaunchKernel",
                       driver.cuLaunchKernel(kernel_, std::min(count, MAX_BLOCKS), 1, 1, THREADS, 1, 1, 0, stream_, parameters, nullptr));
    }
    driver.require("cuEventRecord", driver.cuEventRecord(slot.event, stream_));
    ++in_flight_;
}

size_t Scatter::ended() {
    const CudaDriver &driver = cuda_driver();
    size_t count = 0;
    while (in_flight_ > 0) {
        const CudaResult result = driver.cuEventQuery(slots_[first_].event);
        if (result == CUDA_NOT_READY) {
            break;
        }
        driver.require("a launch of the scatter kernel", result);
        first_ = (first_ + 1) % slots_.size();
        --in_flight_;
        ++count;
    }
    return count;
}

} // namespace baton
