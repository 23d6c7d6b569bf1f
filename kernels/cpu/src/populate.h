// A thread that makes the KV pool's pages before a step comes to them. Nobody has touched a new pool, and the system clears a
// page when it is first written: within a step, by one thread, for which all others wait.
#pragma once
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#endif

class Populate {
  public:
    ~Populate() { end(); }

    // A step comes as far as step_end, later steps to what follows: a new pool's blocks are handed out in ascending order.
    // The pool may be any memory; what is in it stays as it is.
    void ahead(const void* pool, const void* pool_end, const void* step_end) {
        const auto begin = address(pool), end = address(pool_end), used = address(step_end);
        const bool other = begin != begin_ || end != end_;
        if (!other && (wanted_ == end || wanted_ >= used + NEAR)) return;
        begin_ = begin, end_ = end, wanted_ = std::min(used + FAR, end);
        want(used, wanted_, other);
    }
    // No page is begun from now on.
    void end() {
        {
            std::lock_guard hold(mutex_);
            leaving_ = true;
        }
        wake_.notify_one();
        if (thread_.joinable()) thread_.join();
    }

  private:
    using Address = std::uintptr_t;
    // Steps write some hundred MiB a second at most. FAR - NEAR: how often the thread is woken.
    static constexpr Address NEAR = 192 << 20, FAR = 256 << 20;
    // One huge page: while the system makes pages, it lets nobody change the process's mappings, and this thread may be put
    // aside in the middle of it.
    static constexpr Address SLICE = 2 << 20;

    static Address address(const void* p) { return reinterpret_cast<Address>(p); }

#if defined(__linux__)
    // What steps have reached has its pages; so has what was populated, unless the pool is another one.
    void want(Address from, Address to, bool other) {
        const auto page = static_cast<Address>(sysconf(_SC_PAGESIZE));
        from = (from + page - 1) / page * page, to = to / page * page;
        {
            std::lock_guard hold(mutex_);
            next_ = other ? from : std::max(from, next_);
            to_ = to;
        }
        wake_.notify_one();
        if (from >= to) return;
        try {
            if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
        } catch (const std::system_error&) {
            // Without a thread the steps make their pages.
        }
    }
    void work() {
        setpriority(PRIO_PROCESS, 0, 19);  // of this thread alone: it takes what nobody needs
        for (std::unique_lock hold(mutex_);;) {
            wake_.wait(hold, [this] { return leaving_ || next_ < to_; });
            if (leaving_) return;
            const Address from = next_;
            next_ = std::min((from / SLICE + 1) * SLICE, to_);
            const Address size = next_ - from;
            hold.unlock();
            // Refused: the system cannot do it, has no memory, or the pool is gone. Nothing depends on it.
            if (madvise(reinterpret_cast<void*>(from), size, MADV_POPULATE_WRITE)) return;
            hold.lock();
        }
    }
#else
    void want(Address, Address, bool) {}
#endif

    Address begin_ = 0, end_ = 0, wanted_ = 0;  // the pool, and what the thread was last told; not its business
    std::mutex mutex_;
    std::condition_variable wake_;
    Address next_ = 0, to_ = 0;  // what is to be populated
    bool leaving_ = false;
    std::thread thread_;
};
