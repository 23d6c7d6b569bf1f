// y = x W^T. In float32 every output is one chain of fused multiply-adds over k, ascending, from zero; in whole numbers
// (linear8.cpp) and in parts (linear_parts.cpp) it is one sum over groups, ascending; by tiles (linear_tiles.cpp) one exact sum.
// Each is the same in every tile, so a row's bits depend on nothing but that row and W.
#pragma once
#include <functional>
#include <vector>

#include "matrix.h"
#include "pool.h"
#include "tiles.h"

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

// The same with one scale for a row and 16 bits for a number, as two signed digits: number = 256 * high + low, the largest
// at 127 * 256 + 127. Room for whole tiles of rows; inputs past k are zero.
class RowsOfDigits {
  public:
    void shape(long rows, long k);
    // A row with a NaN or an infinity in it has NaN for a scale.
    void set(long row, const float* x);

    long k = 0;  // rounded up to whole tiles
    // Of 16 bits: the low digits [k] lie behind the high ones.
    const std::int8_t* row(long r) const { return digits_.data() + r * 2 * k; }
    float scale(long r) const { return scales_[r]; }

  private:
    long given_ = 0;
    Lines<std::int8_t> digits_;
    Lines<float> scales_;
};

// Rows of x as tiles of bfloat16: PARTS numbers for an input, whose sum it is (to 2^-25 of it, and above 2^-100).
constexpr long PARTS = 3;
class RowsOfParts {
  public:
    // k: whole GROUPs. Room for whole tiles of rows.
    void shape(long rows, long k);
    void set(long row, const float* x);

    long groups = 0;  // an even number
    // Those of row's EDGE rows and a group: [EDGE][PARTS][GROUP], the smallest first
    const unsigned char* parts(long row, long g) const {
        return parts_.data() + (row / EDGE * groups + g) * PARTS * TILE_BYTES;
    }
    // [EDGE] sums of a group's inputs
    const float* totals(long row, long g) const { return totals_.data() + (row / EDGE * groups + g) * EDGE; }

  private:
    long given_ = 0;
    Lines<unsigned char> parts_;
    Lines<float> totals_;
};

// Inputs of matrices that do not multiply in float32.
struct LowRows {
    Rows8 whole;
    RowsOfDigits digits;
    RowsOfParts parts;
    void shape(Products by, long rows, long k) {
        if (by == Products::whole) whole.shape(rows, k);
        if (by == Products::tiles) digits.shape(rows, k);
        if (by == Products::parts) parts.shape(rows, k);
    }
    void set(Products by, long row, const float* x) {
        if (by == Products::whole) whole.set(row, x);
        if (by == Products::tiles) digits.set(row, x);
        if (by == Products::parts) parts.set(row, x);
    }
};

constexpr long BAND = 96;  // rows that are done before the next panel: a multiple of this, whole tiles of every kind
static_assert(BAND % MR == 0 && BAND % EDGE == 0);

// What the phases of one thread need for themselves.
struct Buffers {
    Lines<float> panel;          // weights of one panel in float32, or sums of some
    Lines<unsigned char> tiles;  // those of some panels in format t8
};

// x [rows, k] with row stride ldx, or the same in `low` where the matrix does not multiply in float32; y [rows, n] with row
// stride ldy.
struct Product {
    const Matrix& m;
    const float* x;
    long ldx;
    const LowRows* low;
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
constexpr long DIRECT_ROWS = MR + MR / 3;
// In float32, at most DIRECT_ROWS rows. `ahead`: what this thread reads next.
void linear_direct(const Product& p, const Part& part, const char* ahead);
// Panels that it does at a time.
long direct_panels(long rows);
// In whole numbers.
void linear8(const Product& p, const Part& part, const char* ahead);
// The same by tiles, on a thread that has made Tiles.
void linear_tiles(const Product& p, const Part& part, Buffers& mem, const char* ahead);
// In parts, on a thread that has made Tiles.
void linear_parts(const Product& p, const Part& part, Buffers& mem, const char* ahead);
// How 8 bits are multiplied: amx-int8 (linear_tiles), avx512-vnni, avx-vnni or "plain".
const char* low_simd();
