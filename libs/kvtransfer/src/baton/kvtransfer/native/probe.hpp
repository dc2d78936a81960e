// One measurement of a link: a row of puts (or gets) of one size, then a flush. Stepped by the queue's thread, awaited by the caller.
#pragma once

#include "memory.hpp"

#include <condition_variable>
#include <mutex>
#include <string>

namespace baton {

class Path;

class Probe {
public:
    Probe(MemoryPtr local, int64_t num_bytes, bool is_write);

    // --- any thread ---
    // GB/s. Waits; throws Failure.
    double wait(int64_t timeout_ns);
    void fail(int status, const std::string &text);

    // --- the queue's thread ---
    // Posts what fits; true when it did something.
    bool step(Path &path);
    // It has its result, and nothing refers to it any more.
    bool is_over() const { return done_ && outstanding_ <= 0; }

    // --- for the path ---
    const Memory &memory() const { return *local_; }
    char *local() const { return reinterpret_cast<char *>(local_->address()); }
    int64_t num_bytes() const { return num_bytes_; }
    bool is_write() const { return is_write_; }
    int outstanding() const { return outstanding_; }
    // Something that refers to this probe is under way.
    void begin_operation() { ++outstanding_; }
    void operation_ended(int status);
    // The flush was such an operation.
    void flush_ended(int status);
    // The flush was none.
    void finish();
    // A piece of what was pulled.
    void arrived(int64_t offset, const char *payload, size_t num_bytes);

private:
    const MemoryPtr local_;
    const int64_t num_bytes_;
    const bool is_write_;
    const int count_;
    int posted_ = 0;
    int outstanding_ = 0;
    int64_t pulled_bytes_ = 0; // of the pull under way
    bool warm_ = false;        // the first put is not counted: it may set things up
    bool flushing_ = false;
    int64_t start_ns_ = 0;
    int64_t end_ns_ = 0;

    std::mutex mutex_;
    std::condition_variable changed_;
    bool done_ = false; // written under the lock, by the queue's thread once the probe is its own
    int status_ = 0;
    std::string text_;
};

} // namespace baton
