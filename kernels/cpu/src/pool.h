// Threads of its own, asleep between steps. Torch's OpenMP threads are left alone: nothing is linked against OpenMP, so a
// process never has two OpenMP runtimes because of this library.
#pragma once
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits while `word` is `old`: spins for some tens of microseconds (the usual gap between two phases of a step), then
// sleeps, so that a waiting thread never takes a core from a busy neighbour for long.
constexpr int SPINS = 800;
template <class T>
static inline void wait_while(const std::atomic<T>& word, T old) {
    for (int i = 0; i < SPINS; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
    }
    while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

class Pool;

// One thread's view of a parallel run. All threads go through the same phases in the same order, but none waits for a
// thread, only for work: a phase is over when its tasks are done, and a thread that the system has put aside between two
// tasks holds nobody up. (A barrier would wait for it, some hundred times a step, whenever a neighbour is busy.)
struct Worker {
    Pool& pool;
    int rank;
    int phase = 0;

    // Tasks [stretch(count, t), stretch(count, t + 1)) of `count` are thread t's own.
    long stretch(long count, int thread) const;
    // f(i) for i in [0, count), then `last()` by one of the threads; returns when all of that is done. Each thread goes through
    // a stretch of its own in order, so that what it asks memory for in advance is what it takes next, and then through what
    // others have left of theirs. What f computes must not depend on the thread that runs it.
    template <class F, class Last>
    void each(long count, F&& f, Last&& last);
    template <class F>
    void each(long count, F&& f) {
        each(count, f, [] {});
    }
};

class Pool {
  public:
    // Throws std::system_error when the system starts no more threads; those that run are ended first, for a thread that
    // nobody joins would end the process.
    explicit Pool(int threads) : size_(threads) {
        try {
            for (int rank = 1; rank < size_; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
        } catch (...) {
            end();
            throw;
        }
    }
    ~Pool() { end(); }
    int size() const { return size_; }

    // f(Worker&) on every thread; at most `phases` calls of Worker::each.
    template <class F>
    void run(int phases, F&& f) {
        if (phases > capacity_) {
            phases_ = std::make_unique<Phase[]>(phases), taken_ = std::make_unique<std::atomic<long>[]>(phases * size_);
            capacity_ = phases;
        }
        for (int i = 0; i < phases; ++i) {
            phases_[i].done.store(0, std::memory_order_relaxed), phases_[i].over.store(0, std::memory_order_relaxed);
            for (int rank = 0; rank < size_; ++rank) taken_[i * size_ + rank].store(0, std::memory_order_relaxed);
        }
        context_ = &f;
        job_ = [](void* context, Worker& w) { (*static_cast<std::remove_reference_t<F>*>(context))(w); };
        open_ = true;
        start();
        Worker w{*this, 0};
        f(w);
        // Late threads find the door closed; those inside must leave before what they look at goes away.
        open_ = false;
        for (int n; (n = inside_.load()) != 0;) wait_while(inside_, n);
    }

  private:
    friend struct Worker;
    struct alignas(64) Phase {
        std::atomic<long> done;
        std::atomic<int> over;
    };

    void end() {
        leaving_ = true;
        start();
        for (auto& t : threads_) t.join();
    }
    void start() {
        started_.fetch_add(1);
        started_.notify_all();
    }
    void serve(int rank) {
        for (int seen = 0;;) {
            wait_while(started_, seen);
            seen = started_.load();
            if (leaving_) return;
            // Sequentially consistent, both here and in run(): either it waits for us, or we see that it is over.
            inside_.fetch_add(1);
            if (open_.load()) {
                Worker w{*this, rank};
                job_(context_, w);
            }
            inside_.fetch_sub(1);
            inside_.notify_all();
        }
    }

    int size_;
    std::vector<std::thread> threads_;
    std::unique_ptr<Phase[]> phases_;
    std::unique_ptr<std::atomic<long>[]> taken_;  // [phase][thread] of its stretch
    int capacity_ = 0;
    void* context_ = nullptr;
    void (*job_)(void*, Worker&) = nullptr;
    std::atomic<bool> leaving_{false};
    alignas(64) std::atomic<bool> open_{false};
    alignas(64) std::atomic<int> started_{0};
    alignas(64) std::atomic<int> inside_{0};
};

inline long Worker::stretch(long count, int thread) const { return count * thread / pool.size_; }

template <class F, class Last>
void Worker::each(long count, F&& f, Last&& last) {
    auto& p = pool.phases_[phase];
    std::atomic<long>* taken = &pool.taken_[phase++ * pool.size_];
    const long tasks = count ? count : 1;  // so that somebody is the last
    for (int t = 0; t < pool.size_; ++t) {
        const int of = (rank + t) % pool.size_;
        const long first = stretch(tasks, of), end = stretch(tasks, of + 1);
        for (long i; (i = first + taken[of].fetch_add(1, std::memory_order_relaxed)) < end;) {
            if (i < count) f(i);
            if (p.done.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) {
                last();
                // Sequentially consistent, as all that is notified about here: the library looks whether anybody sleeps before it
                // wakes, and may look before a weaker store can be seen by one who is just falling asleep.
                p.over.store(1);
                p.over.notify_all();
            }
        }
    }
    wait_while(p.over, 0);
}
