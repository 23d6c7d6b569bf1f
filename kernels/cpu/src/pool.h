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

// Waits until `word` is no longer `old`: spins for some tens of microseconds (the usual gap between two phases of a step),
// then sleeps, so that a waiting thread never takes a core from a busy neighbour for long.
constexpr int SPINS = 800;
static inline void wait_while(const std::atomic<unsigned>& word, unsigned old) {
    for (int i = 0; i < SPINS; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
    }
    while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

class Pool;

// One thread's view of a parallel run. All threads go through the same phases in the same order.
struct Worker {
    Pool& pool;
    int rank;
    int phase = 0;

    // f(i) for i in [0, count), each by whichever thread comes first; returns when all of them are done.
    // What f computes must not depend on the thread that runs it.
    template <class F>
    void each(long count, F&& f);
};

class Pool {
  public:
    explicit Pool(int threads) : size_(threads) {
        for (int rank = 1; rank < size_; ++rank) threads_.emplace_back([this, rank] { serve(rank); });
    }
    ~Pool() {
        job_ = nullptr;
        start();
        for (auto& t : threads_) t.join();
    }
    int size() const { return size_; }

    // f(Worker&) on every thread; at most `phases` calls of Worker::each.
    template <class F>
    void run(int phases, F&& f) {
        if (phases > capacity_) {
            counters_ = std::make_unique<Counter[]>(phases);
            capacity_ = phases;
        }
        for (int i = 0; i < phases; ++i) counters_[i].next.store(0, std::memory_order_relaxed);
        context_ = &f;
        job_ = [](void* context, Worker& w) { (*static_cast<std::remove_reference_t<F>*>(context))(w); };
        start();
        work(0);
    }

    void barrier() {
        if (size_ == 1) return;
        unsigned epoch = epoch_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            epoch_.store(epoch + 1, std::memory_order_release);
            epoch_.notify_all();
        } else {
            wait_while(epoch_, epoch);
        }
    }

  private:
    friend struct Worker;
    struct alignas(64) Counter {
        std::atomic<long> next;
    };

    void start() {
        if (size_ == 1) return;
        started_.fetch_add(1, std::memory_order_release);
        started_.notify_all();
    }
    void work(int rank) {
        Worker w{*this, rank};
        job_(context_, w);
        barrier();  // nobody may still be in f when run() returns
    }
    void serve(int rank) {
        for (unsigned seen = 0;; ++seen) {
            wait_while(started_, seen);
            if (!job_) return;
            work(rank);
        }
    }

    int size_;
    std::vector<std::thread> threads_;
    std::unique_ptr<Counter[]> counters_;
    int capacity_ = 0;
    void* context_ = nullptr;
    void (*job_)(void*, Worker&) = nullptr;
    alignas(64) std::atomic<unsigned> started_{0};
    alignas(64) std::atomic<unsigned> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
};

template <class F>
void Worker::each(long count, F&& f) {
    auto& next = pool.counters_[phase++].next;
    for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
    pool.barrier();
}
