// Memory for packed weights: taken piece by piece, given back all at once; and vectors on cache lines.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif
#endif

// Vectors that begin on a cache line: a SIMD register's load from them touches one line, not two.
template <class T>
struct OnLine {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};
    OnLine() = default;
    template <class U>
    OnLine(const OnLine<U>&) {}
    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), LINE)); }
    void deallocate(T* p, std::size_t) { ::operator delete(p, LINE); }
    bool operator==(const OnLine&) const { return true; }
};
template <class T>
using Lines = std::vector<T, OnLine<T>>;

class Arena {
  public:
    Arena() = default;
    Arena(const Arena&) = delete;
    ~Arena() {
        for (void* p : chunks_) std::free(p);
    }
    // Aligned to a cache line; throws std::bad_alloc.
    void* take(long bytes) {
        bytes = (bytes + LINE - 1) / LINE * LINE;
        if (bytes > left_) grow(bytes);
        void* p = next_;
        next_ += bytes, left_ -= bytes, taken_ += bytes;
        return p;
    }

    long taken() const { return taken_; }

    // Puts what was taken into huge pages, where the system has such: looking up 24,000 small ones for each step costs a
    // tenth of it. It takes 5 ms for each, and far more where memory is in pieces: a task for a thread without hurry, after
    // the start. Other threads may read meanwhile.
    void collapse(const std::atomic<bool>& stop) const {
#if defined(__linux__)
        for (int refused = 0; char* chunk : chunks_) {
            char* const end = chunk == chunks_.back() ? next_ : chunk + CHUNK;  // a larger one: its beginning
            for (char* p = chunk; p + PAGE <= end && refused < 4 && !stop; p += PAGE)
                if (madvise(p, PAGE, MADV_COLLAPSE)) ++refused;
        }
#endif
    }

  private:
    static constexpr long LINE = 64, PAGE = 2 << 20, CHUNK = 64 << 20;
    void grow(long bytes) {
        bytes = (std::max(bytes, CHUNK) + PAGE - 1) / PAGE * PAGE;
        void* p = std::aligned_alloc(PAGE, bytes);
        if (!p) throw std::bad_alloc();
        chunks_.push_back(static_cast<char*>(p));
        next_ = chunks_.back(), left_ = bytes;
    }
    std::vector<char*> chunks_;
    char* next_ = nullptr;
    long left_ = 0, taken_ = 0;
};
