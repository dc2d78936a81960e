#include "path.hpp"

#include "link.hpp"

namespace baton {

namespace {

constexpr int64_t QUANTUM_BYTES = 4 << 20; // of one write before the next one of the peer has its turn
constexpr int QUANTUM_PUTS = 256;

} // namespace

bool PiecewisePath::post(Write &write) {
    int64_t bytes = 0;
    for (int puts = 0; write.has_piece(); ++puts) {
        if (bytes >= QUANTUM_BYTES || puts >= QUANTUM_PUTS || write.is_cancelled() || !link_.may_put()) {
            return true;
        }
        const Span piece = write.take_piece(max_piece_bytes_);
        write.count_put(piece.length);
        put(write, piece);
        bytes += piece.length;
    }
    return false;
}

} // namespace baton
