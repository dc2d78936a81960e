// How the writes of a link have their turns: post, wait for an event, flush, ring, end.
#include "cuda.hpp"
#include "failure.hpp"
#include "link.hpp"
#include "queue.hpp"

namespace baton {

void Link::look_at(const WritePtr &write) {
    write->touched_.store(false, std::memory_order_seq_cst);
    if (write->phase() == Write::Phase::FINAL) {
        return;
    }
    open_.emplace(write->id(), write);
    if (is_over()) {
        finalize(write, WriteState::FAILED, UCS_ERR_CANCELED, "the peer was closed");
        return;
    }
    if (closing_) {
        write->cancel_requested_ = true;
    }
    run_again(write);
}

bool Link::pump() {
    switch (state()) {
    case LinkState::CONNECTING:
        if (is_welcome_) {
            be_welcomed();
        } else if (is_greeting() && greet()) {
            return true;
        }
        break;
    case LinkState::READY:
        break;
    case LinkState::LOST:
        return settle();
    case LinkState::CLOSED:
        return false;
    }
    bool worked = step_probe();
    worked |= path_ && path_->progress();
    worked |= try_gated();
    for (size_t turns = runnable_.size(); turns > 0 && may_put(); --turns) {
        WritePtr write = runnable_.front();
        runnable_.pop_front();
        write->runnable_ = false;
        advance(write);
        worked = true;
    }
    return close_step() || worked;
}

bool Link::step_probe() {
    if (!probe_) {
        return false;
    }
    const bool worked = probe_->step(*path_);
    if (probe_->is_over()) {
        probe_.reset();
    }
    return worked;
}

void Link::run_again(const WritePtr &write) {
    if (!write->runnable_ && write->phase() != Write::Phase::FINAL) {
        write->runnable_ = true;
        runnable_.push_back(write);
    }
}

void Link::wait_for_event(const WritePtr &write) {
    if (!write->gated_) {
        write->gated_ = true;
        gated_.push_back(write);
    }
}

// One error is one write's: the others of the list are looked at all the same.
bool Link::try_gated() {
    bool worked = false;
    std::vector<WritePtr> gated;
    gated.swap(gated_);
    for (const auto &write : gated) {
        write->gated_ = false;
        bool open = write->is_cancelled() || !write->awaits_event();
        try {
            open = open || cuda_event_fired(write->batches_.front().ready_event);
        } catch (const Failure &failure) {
            write->local_error_ = failure.function() + ": " + failure.what();
            open = true;
        }
        if (!open) {
            wait_for_event(write);
            continue;
        }
        if (write->awaits_event()) {
            write->batches_.front().ready_event = 0;
        }
        run_again(write);
        worked = true;
    }
    return worked;
}

// One turn of one write: posts a quantum, or takes the next step of its ending.
void Link::advance(const WritePtr &write) {
    using Phase = Write::Phase;
    switch (write->phase()) {
    case Phase::POSTING:
        if (post_turn(write)) {
            break;
        }
        if (path_->rings_in_order() && !write->is_cancelled() && write->local_error_.empty()) {
            ring(*write);
        } else {
            flush(*write);
        }
        break;
    case Phase::FLUSHED:
        if (write->outstanding() > 0) {
            break; // operation_ended brings it here again
        }
        if (!write->local_error_.empty()) {
            finalize(write, WriteState::FAILED, UCS_ERR_IO_ERROR, write->local_error_);
        } else if (write->is_cancelled()) {
            finalize(write, WriteState::QUIESCED, UCS_OK, "");
        } else {
            ring(*write);
        }
        break;
    case Phase::RUNG:
        if (write->outstanding() == 0) {
            finalize(write, WriteState::DONE, UCS_OK, "");
        }
        break;
    case Phase::FLUSHING:
    case Phase::RINGING:
    case Phase::FINAL:
        break;
    }
}

// True while the write has to stay in this phase.
bool Link::post_turn(const WritePtr &write) {
    write->take_incoming();
    if (write->is_cancelled() || !write->local_error_.empty()) {
        write->batches_.clear();
        return false;
    }
    if (path_->post(*write)) {
        run_again(write);
        return true;
    }
    if (write->awaits_event()) {
        wait_for_event(write);
        return true;
    }
    return !write->finishing_ || !write->batches_.empty();
}

void Link::flush(Write &write) {
    write.phase_ = Write::Phase::FLUSHING;
    write.begin_operation();
    path_->flush(write);
}

void Link::ring(Write &write) {
    write.record_.nonce = params_.nonce;
    seal(write.record_);
    write.phase_ = Write::Phase::RINGING;
    write.begin_operation();
    path_->ring(write);
}

void Link::put_begins(Write &write) {
    write.begin_operation();
    ++in_flight_;
}

void Link::put_done(Write &write, ucs_status_t status) {
    --in_flight_;
    if (status != UCS_OK) {
        fail(status, std::string("a write failed: ") + status_text(status));
    }
    operation_ended(write);
}

void Link::flushed(Write &write, ucs_status_t status) {
    if (status == UCS_OK) {
        write.phase_ = write.phase() == Write::Phase::RINGING ? Write::Phase::RUNG : Write::Phase::FLUSHED;
        run_again(write.shared_from_this());
    } else {
        fail(status, std::string("a flush failed: ") + status_text(status));
    }
    write.end_operation();
}

void Link::operation_ended(Write &write) {
    write.end_operation();
    if (write.outstanding() == 0 && (write.phase() == Write::Phase::FLUSHED || write.phase() == Write::Phase::RUNG)) {
        run_again(write.shared_from_this());
    }
}

void Link::finalize(const WritePtr &write, WriteState state, int status, const std::string &text) {
    if (!write->end(state, status, text)) {
        return;
    }
    if (state == WriteState::DONE) {
        path_->done();
    }
    open_.erase(write->id());
    queue_->notices().push(NoticeKind::WRITE_FINAL, write->id());
}

} // namespace baton
