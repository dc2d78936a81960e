// Stores pages straight into another process's mapped device memory: scattered ones by a kernel, one launch for thousands; long runs by the copy
// engines, which leave the multiprocessors to whoever computes.
// Used by one thread, whose CUDA context is bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace baton {

struct Span;

class Scatter {
public:
    static constexpr size_t MAX_TILES = 1 << 14;      // of one launch
    static constexpr int64_t TILE_BYTES = 128 << 10;  // what one thread block copies at a time: longer spans are cut
    static constexpr int64_t COPY_BYTES = 2 << 20;    // from here on a span is worth a copy of its own (some 3 us of the caller)

    Scatter();
    // Waits for what was launched.
    ~Scatter();
    Scatter(const Scatter &) = delete;
    Scatter &operator=(const Scatter &) = delete;

    // Whether another launch may be made now.
    bool has_room() const { return in_flight_ < slots_.size(); }
    // Stores at most MAX_TILES tiles by the kernel and each of `runs` by a copy, from `source` to `destination`; offsets are relative to those.
    // Launches end in order.
    void launch(const std::vector<Span> &tiles, const std::vector<Span> &runs, uint64_t source, uint64_t destination);
    // How many launches have ended since the last call.
    size_t ended();

private:
    struct Slot {
        void *host = nullptr; // pinned: the list of tiles
        uint64_t device = 0;  // its copy
        void *event = nullptr;
    };
    void release();

    void *stream_ = nullptr;
    void *module_ = nullptr;
    void *kernel_ = nullptr;
    std::vector<Slot> slots_;
    size_t first_ = 0; // of the launches in flight
    size_t in_flight_ = 0;
};

} // namespace baton
