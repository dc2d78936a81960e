// One measurement of a link: a row of puts (or gets) of one size, then a flush. Stepped by the queue's thread, awaited by the caller.
#pragma once

#include "memory.hpp"
#include "message.hpp"

#include <condition_variable>
#include <mutex>
#include <string>

namespace baton {

class Link;

class Probe {
public:
    Probe(MemoryPtr local, int64_t num_bytes, bool is_write);

    // The queue's thread: posts what fits; true when it did something.
    bool step(Link &link);
    void fail(int status, const std::string &text);
    bool is_done() const { return done_; }
    void put_done(ucs_status_t status);
    // Answers to its messages.
    void acknowledged(uint64_t ticket);
    void arrived(const MessageHeader &header, const char *payload, size_t num_bytes);

    // The caller: GB/s. Throws Failure.
    double wait(int64_t timeout_ns);

private:
    static void on_put(void *request, ucs_status_t status, void *probe);
    static void on_flushed(void *request, ucs_status_t status, void *probe);
    void post(Link &link);
    void post_launch(Link &link);
    void post_messages(Link &link);
    void post_put(Link &link);
    void flush(Link &link);
    void finish();

    MemoryPtr local_;
    int64_t num_bytes_;
    bool is_write_;
    int count_;
    int posted_ = 0;
    int outstanding_ = 0;
    int64_t pulled_bytes_ = 0; // of the pull under way
    bool warm_ = false; // the first put is not counted: it may set things up
    bool flushing_ = false;
    int64_t start_ns_ = 0;
    int64_t end_ns_ = 0;

    std::mutex mutex_;
    std::condition_variable changed_;
    bool done_ = false;
    int status_ = 0;
    std::string text_;
};

} // namespace baton
