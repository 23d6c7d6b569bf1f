// Memory for packed weights: taken piece by piece, given back all at once; and vectors on cache lines.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

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

  private:
    // Ordinary pages: huge ones make a step 2% faster, and a start seconds slower where the system must first find them.
    static constexpr long LINE = 64, CHUNK = 64 << 20;
    void grow(long bytes) {
        bytes = std::max(bytes, CHUNK);
        void* p = std::aligned_alloc(LINE, bytes);
        if (!p) throw std::bad_alloc();
        chunks_.push_back(p);
        next_ = static_cast<char*>(p), left_ = bytes;
    }
    std::vector<void*> chunks_;
    char* next_ = nullptr;
    long left_ = 0, taken_ = 0;
};
