// A thread that makes the KV pool's pages before a step comes to them. Nobody has touched a new pool, and the system clears a
// page when it is first written: within a step, by one thread, for which all others wait. This one works while there are no
// steps. It touches what it wants to be there: madvise(MADV_POPULATE_WRITE) would let nobody change the process's mappings
// meanwhile.
#pragma once
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

class Populate {
  public:
    ~Populate() { end(); }

    // While it lives a step runs, which comes as far as step_end; later ones come to what follows, for a new pool's blocks are
    // handed out in ascending order. The pool may be any memory; what is in it stays as it is. It must be there until a step
    // with another one begins, or `end` was called.
    class Step {
      public:
        Step(Populate& of, const void* pool, const void* pool_end, const void* step_end) : of_(of) {
            of.begins(address(pool), address(pool_end), address(step_end));
        }
        ~Step() { of_.ends(); }
        Step(const Step&) = delete;

      private:
        Populate& of_;
    };
    // Nothing is touched from now on.
    void end() {
        {
            std::lock_guard hold(mutex_);
            leaving_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

  private:
    using Address = std::uintptr_t;
    // Steps write some hundred MiB a second at most. No more than a part of the pool: who gives it all the memory there is
    // should not be without any because of what is not in use.
    static constexpr Address MOST = 256 << 20, PART = 16;
    // One huge page: a step that begins meanwhile shares a core for as long as that takes.
    static constexpr Address SLICE = 2 << 20, PAGE = 4096;
    // So long after a step there is nothing to do: where steps follow each other, every core is needed for them.
    static constexpr std::chrono::milliseconds QUIET{5};

    static Address address(const void* p) { return reinterpret_cast<Address>(p); }

    void begins(Address pool, Address pool_end, Address used) {
        std::unique_lock hold(mutex_);
        busy_ = true;
        if (pool != pool_ || pool_end != pool_end_) {
            changed_.wait(hold, [this] { return !touching_; });
            pool_ = pool, pool_end_ = pool_end, next_ = to_ = pool;
        }
        const Address far = std::min(MOST, (pool_end - pool) / PART), near = far / 4 * 3;
        if (to_ == pool_end || to_ >= used + near) return;
        next_ = std::max(used, next_), to_ = std::min(used + far, pool_end);  // what steps have reached has its pages
        try {
            if (next_ < to_ && !thread_.joinable()) thread_ = std::thread([this] { work(); });
        } catch (const std::system_error&) {
            // Without a thread the steps make their pages.
        }
    }
    void ends() {
        bool more;
        {
            std::lock_guard hold(mutex_);
            busy_ = false, more = next_ < to_;
        }
        if (more) changed_.notify_all();
    }
    void work() {
        for (std::unique_lock hold(mutex_);;) {
            changed_.wait(hold, [this] { return leaving_ || (next_ < to_ && !busy_); });
            changed_.wait_for(hold, QUIET, [this] { return leaving_ || busy_; });
            if (leaving_) return;
            while (next_ < to_ && !busy_ && !leaving_) touch(hold);
        }
    }
    void touch(std::unique_lock<std::mutex>& hold) {
        Address at = next_;
        const Address end = next_ = std::min((at / SLICE + 1) * SLICE, to_);
        touching_ = true;
        hold.unlock();
        // Atomic, so that it is no harm if a step writes there. Volatile, so that it is no mere reading.
        for (; at < end; at = at / PAGE * PAGE + PAGE)
            __atomic_fetch_add(reinterpret_cast<volatile unsigned char*>(at), 0, __ATOMIC_RELAXED);
        hold.lock();
        touching_ = false;
        changed_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    Address pool_ = 0, pool_end_ = 0;
    Address next_ = 0, to_ = 0;  // what is to be populated
    bool busy_ = false, touching_ = false, leaving_ = false;
    std::thread thread_;
};
