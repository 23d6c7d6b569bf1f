// y = x W^T. In float32 every output is one chain of fused multiply-adds over k, ascending, from zero; in whole numbers
// (linear8.cpp) it is one sum over groups, ascending. Either is the same in every tile, so a row's bits depend on nothing
// but that row and W.
#pragma once
#include <functional>
#include <vector>

#include "matrix.h"
#include "pool.h"

enum class Then {
    store,   // y = acc + bias
    add,     // y += acc + bias
    swiglu,  // y = silu(gate) * up
};

// Rows of x in whole numbers: x = scale * number for each GROUP of a row, the largest at 127. Inputs past k are zero.
class Rows8 {
  public:
    // Room for `rows` of `k` inputs each.
    void shape(long rows, long k);
    // A row with a NaN or an infinity in it has NaN for scales.
    void set(long row, const float* x);

    long k = 0, groups = 0;  // k: rounded up to whole groups
    const std::int8_t* row(long r) const { return numbers_.data() + r * k; }
    const float* scales(long r) const { return scales_.data() + r * groups; }
    const float* totals(long r) const { return totals_.data() + r * groups; }        // scale * sum of the numbers
    const std::int32_t* sums(long r) const { return sums_.data() + r * groups; }

  private:
    long given_ = 0;
    Lines<std::int8_t> numbers_;
    Lines<float> scales_, totals_;
    Lines<std::int32_t> sums_;
};

constexpr long BAND = 96;  // rows that are done before the next panel: a multiple of this, whole tiles of every kind
static_assert(BAND % MR == 0);

// What the phases of one thread need for themselves.
struct Buffers {
    Lines<float> panel;  // weights of one panel in float32
};

// x [rows, k] with row stride ldx, or the same in x8 where the matrix is `whole`; y [rows, n] with row stride ldy.
struct Product {
    const Matrix& m;
    const float* x;
    long ldx;
    const Rows8* x8;
    long rows;
    float* y;
    long ldy;
    Then then;
};
// All threads call it together. `next`: what is read after this, or null. `last` is called once, when y is complete.
void linear(Worker& w, const Product& p, std::vector<Buffers>& buffers, const Matrix* next,
            const std::function<void()>& last);

// What one thread does of it without a pause.
struct Part {
    long panel, panels, row, rows;
};
// Memory that is read next, asked for a little at each call.
struct Coming {
    const char* at;
    long step;
    void operator()() {
        for (long i = 0; i < step; i += 64) prefetch(at + i);
        at += step;
    }
};
// In float32, at most MR rows. `ahead`: what this thread reads next.
void linear_direct(const Product& p, const Part& part, const char* ahead);
// Panels that it does at a time.
long direct_panels(long rows);
// In whole numbers.
void linear8(const Product& p, const Part& part, const char* ahead);
// How it does them: avx512-vnni, avx-vnni or "plain".
const char* whole_simd();
