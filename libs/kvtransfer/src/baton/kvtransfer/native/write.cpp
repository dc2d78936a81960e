#include "write.hpp"

#include "clock.hpp"
#include "link.hpp"
#include "queue.hpp"

#include <algorithm>

namespace baton {

Write::Write(std::shared_ptr<Link> link, uint64_t id, uint64_t room, int64_t source_bytes, int64_t destination_bytes)
    : link_(std::move(link)), id_(id), room_(room), source_bytes_(source_bytes), destination_bytes_(destination_bytes) {}

long Write::post(const int64_t *rows, size_t n, uint64_t ready_event) {
    Batch batch;
    batch.ready_event = ready_event;
    batch.spans.reserve(n);
    int64_t total = 0, begin = destination_bytes_, end = 0;
    for (size_t i = 0; i < n; ++i) {
        const int64_t source = rows[3 * i], destination = rows[3 * i + 1], length = rows[3 * i + 2];
        if (source < 0 || destination < 0 || length <= 0 || length > source_bytes_ - source || length > destination_bytes_ - destination) {
            return long(i);
        }
        total += length;
        begin = std::min(begin, destination);
        end = std::max(end, destination + length);
        if (!batch.spans.empty()) {
            Span &last = batch.spans.back();
            if (last.source + last.length == source && last.destination + last.length == destination) {
                last.length += length;
                continue;
            }
        }
        batch.spans.push_back({source, destination, length});
    }
    batch.reach = std::min(total, end - begin);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (state() == WriteState::FAILED) {
            return ACCEPTED; // told through the state
        }
        if (finish_requested_ || cancel_requested_ || state() != WriteState::OPEN) {
            return REFUSED;
        }
        if (!batch.spans.empty()) {
            incoming_.push_back(std::move(batch));
        }
    }
    touch();
    return ACCEPTED;
}

long Write::finish(uint32_t slot, Record record) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (finish_requested_) {
            return REFUSED;
        }
        if (state() != WriteState::FAILED && (cancel_requested_ || state() != WriteState::OPEN)) {
            return REFUSED;
        }
        slot_ = slot;
        record_ = record;
        finish_requested_ = true;
    }
    touch();
    return ACCEPTED;
}

void Write::cancel() {
    if (!cancel_requested_.exchange(true)) {
        touch();
    }
}

void Write::touch() {
    if (!touched_.exchange(true, std::memory_order_acq_rel)) {
        link_->queue().submit(shared_from_this());
    }
}

Span Write::take_piece(int64_t max_bytes) {
    Batch &batch = batches_.front();
    if (batch.next == 0 && batch.done_of_next == 0) {
        begin_part();
    }
    const Span &span = batch.spans[batch.next];
    Span piece{span.source + batch.done_of_next, span.destination + batch.done_of_next, span.length - batch.done_of_next};
    if (piece.length > max_bytes) {
        piece.length = max_bytes;
        batch.done_of_next += max_bytes;
        parts_.back().num_bytes += piece.length;
        return piece;
    }
    parts_.back().num_bytes += piece.length;
    batch.done_of_next = 0;
    if (++batch.next == batch.spans.size()) {
        ends_with_.back() = num_begun_ + 1; // the operation that this piece is for begins next, or is the only one under way
        batches_.pop_front();
    }
    return piece;
}

void Write::begin_part() {
    if (parts_.size() < MAX_PARTS) {
        parts_.push_back({now_ns(), 0, 0});
        ends_with_.push_back(0);
        return;
    }
    ends_with_.back() = 0;
    num_ended_parts_ = std::min(num_ended_parts_, MAX_PARTS - 1);
}

// Operations end in about the order in which they began: one that overtakes another ends a part that little too early.
void Write::end_parts() {
    int64_t now = 0;
    while (num_ended_parts_ < parts_.size() && ends_with_[num_ended_parts_] != 0 &&
           (outstanding_ == 0 || num_ended_ >= ends_with_[num_ended_parts_])) {
        now = now ? now : now_ns();
        parts_[num_ended_parts_++].end_ns = now;
    }
}

std::vector<WritePart> Write::parts() const { return state() == WriteState::DONE ? parts_ : std::vector<WritePart>(); }

void Write::count_put(int64_t num_bytes) {
    if (num_puts_.fetch_add(1, std::memory_order_relaxed) == 0) {
        first_post_ns_.store(now_ns(), std::memory_order_relaxed);
    }
    num_bytes_.fetch_add(num_bytes, std::memory_order_relaxed);
}

void Write::take_incoming() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!incoming_.empty()) {
        reach_ += incoming_.front().reach;
        batches_.push_back(std::move(incoming_.front()));
        incoming_.pop_front();
    }
    finishing_ = finish_requested_;
}

bool Write::end(WriteState state, int status, const std::string &text) {
    if (phase_ == Phase::FINAL) {
        return false;
    }
    phase_ = Phase::FINAL;
    batches_.clear();
    std::lock_guard<std::mutex> lock(mutex_);
    incoming_.clear();
    error_status_ = status;
    error_text_ = text;
    done_ns_.store(now_ns(), std::memory_order_relaxed);
    state_.store(int(state), std::memory_order_release);
    return true;
}

void Write::begin_operation() {
    ++num_begun_;
    if (outstanding_++ == 0) {
        busy_since_ns_ = now_ns();
    }
}

void Write::end_operation() {
    ++num_ended_;
    if (--outstanding_ == 0) {
        busy_ns_.store(busy_ns_.load(std::memory_order_relaxed) + now_ns() - busy_since_ns_, std::memory_order_relaxed);
    }
    end_parts();
}

} // namespace baton
