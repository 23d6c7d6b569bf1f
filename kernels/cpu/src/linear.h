// y = x W^T in float32. Every output is one chain of fused multiply-adds over k, ascending, from zero: the same in every
// tile, so a row's bits depend on nothing but that row and W.
#pragma once
#include <functional>

#include "arena.h"
#include "pool.h"
#include "simd.h"

// A linear layer's weights, [n, k], packed as panels [ceil(n / NR)][k][NR]: a vector lane is an output, k runs in memory.
// With `pairs` the matrix is gate over up ([2n, k] packed so that a panel holds VL gates and their VL ups).
struct Matrix {
    long n = 0, k = 0;  // outputs (of a pair: one), inputs
    bool pairs = false;
    float* panels = nullptr;
    float* bias = nullptr;  // packed like a panel with k = 1, or null

    long count() const { return (n + (pairs ? VL : NR) - 1) / (pairs ? VL : NR); }
    const float* panel(long i) const { return panels + i * k * NR; }
    // `arena` owns the packed weights.
    void pack(const float* weight, const float* bias, Pool& pool, Arena& arena);
    // weight[row, 0..k) back from the panels
    void row(long row, float* out) const;
};

enum class Then {
    store,   // y = acc + bias
    add,     // y += acc + bias
    swiglu,  // y = silu(gate) * up
};

// All threads call it together. x [rows, k] with ldx, y [rows, n] with ldy. `next`: what is read after this, or null.
// `last` is called once, when y is complete.
void linear(Worker& w, const Matrix& m, const float* x, long ldx, long rows, float* y, long ldy, Then then,
            const Matrix* next, const std::function<void()>& last);

// acc[m][0..W) = sum over kk of a[m * lda + kk] * row(kk)[0 .. W * VL), kk ascending. `fetch()` is called between: the
// place to ask for what comes next, while this is computed.
template <int M, int W, class Row, class Fetch>
static inline __attribute__((always_inline)) void tile(const float* a, long lda, Row&& row, long k, vf (&acc)[M][W],
                                                       Fetch&& fetch) {
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < W; ++i) acc[m][i] = v_zero();
    const float* p[(M + 2) / 3];  // every third row: the others are one or two strides away, which addressing modes do
    for (int i = 0; i < (M + 2) / 3; ++i) p[i] = a + 3 * i * lda;
    for (long kk = 0; kk < k; ++kk) {
        fetch();
        const float* b = row(kk);
        vf v[W];
#pragma GCC unroll 4
        for (int i = 0; i < W; ++i) v[i] = v_load(b + i * VL);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            vf x = v_set(p[m / 3][(m % 3) * lda + kk]);
#pragma GCC unroll 4
            for (int i = 0; i < W; ++i) acc[m][i] = v_fma(x, v[i], acc[m][i]);
        }
    }
}
