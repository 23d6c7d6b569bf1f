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

// Room for so many; what is in them may be gone.
template <class T>
void grow(Lines<T>& v, long size) {
    if (static_cast<long>(v.size()) < size) v.resize(size);
}

class Arena {
  public:
    Arena() = default;
    Arena(const Arena&) = delete;
    ~Arena() {
        for (const Chunk& chunk : chunks_) std::free(chunk.begin);
    }
    // Aligned to a cache line; throws std::bad_alloc.
    void* take(long bytes) {
        bytes = (bytes + LINE - 1) / LINE * LINE;
        if (bytes > left_) grow(bytes);
        char*& end = chunks_.back().end;
        void* p = end;
        end += bytes, left_ -= bytes, taken_ += bytes;
        return p;
    }

    long taken() const { return taken_; }

    // Puts what was taken into huge pages, where the system has such: looking up 24,000 small ones for each step costs a
    // tenth of it. It takes 5 ms for each, and far more where memory is in pieces: a task for a thread without hurry, after
    // the start. Other threads may read meanwhile.
    void collapse(const std::atomic<bool>& stop) const {
#if defined(__linux__)
        for (int refused = 0; const Chunk& chunk : chunks_)
            for (char* p = chunk.begin; p + PAGE <= chunk.end && refused < 4 && !stop; p += PAGE)
                if (madvise(p, PAGE, MADV_COLLAPSE)) ++refused;
#endif
    }

  private:
    static constexpr long LINE = 64, PAGE = 2 << 20, CHUNK = 64 << 20;
    void grow(long bytes) {
        bytes = (std::max(bytes, CHUNK) + PAGE - 1) / PAGE * PAGE;
        char* p = static_cast<char*>(std::aligned_alloc(PAGE, bytes));
        if (!p) throw std::bad_alloc();
        chunks_.push_back({p, p});
        left_ = bytes;
    }
    struct Chunk {
        char *begin, *end;  // of what was taken
    };
    std::vector<Chunk> chunks_;
    long left_ = 0, taken_ = 0;
};
