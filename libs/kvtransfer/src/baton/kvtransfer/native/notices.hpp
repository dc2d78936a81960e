// What native threads tell Python: a queue that one thread waits on without the GIL.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace baton {

enum class NoticeKind : int { WRITE_FINAL = 0, DOORBELL = 1, LINK_LOST = 2, UNANSWERED = 3 };

struct Notice {
    NoticeKind kind;
    uint64_t id;
};

class Notices {
public:
    void push(NoticeKind kind, uint64_t id) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            notices_.push_back({kind, id});
        }
        arrived_.notify_one();
    }

    // Blocks until there is a notice; empty only after `close`.
    std::vector<Notice> wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        arrived_.wait(lock, [this] { return closed_ || !notices_.empty(); });
        std::vector<Notice> taken;
        taken.swap(notices_);
        return taken;
    }

    void close() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closed_ = true;
        }
        arrived_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable arrived_;
    std::vector<Notice> notices_;
    bool closed_ = false;
};

} // namespace baton
