// The inner loop of everything float32: M rows times W vectors of columns, one chain of fused multiply-adds over k,
// ascending, for each output.
#pragma once
#include "bytes.h"

// acc[m][0..W) = sum over kk of a[m * lda + kk] * row(kk)[0 .. W * VL), kk ascending, from zero. Rows of 16-bit numbers
// become float32 as they are loaded. `fetch()` is called between: the place to ask for what comes next, while this is
// computed.
template <int M, int W, class Row, class Fetch>
static inline __attribute__((always_inline)) void tile(const float* a, long lda, Row&& row, long k, vf (&acc)[M][W],
                                                       Fetch&& fetch) {
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < W; ++i) acc[m][i] = v_zero();
    const float* p[(M + 2) / 3];  // every third row: the others are one or two strides away, which addressing modes do
    for (int i = 0; i < (M + 2) / 3; ++i) p[i] = a + 3 * i * lda;
    for (long kk = 0; kk < k; ++kk) {
        fetch();
        const auto* b = row(kk);
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
