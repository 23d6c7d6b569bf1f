// The end of a tile: bias, then what the layer does with the sums.
#pragma once
#include <algorithm>

#include "linear.h"

static inline vf silu(vf x) { return x / (v_set(1.0f) + v_exp(v_zero() - x)); }

// M rows of sums of one panel, from `row` on.
template <int M>
static inline void store(const Product& p, long panel, long row, vf (&acc)[M][2]) {
    const Matrix& m = p.m;
    if (m.bias) {
        vf b0 = v_load(m.bias + panel * NR), b1 = v_load(m.bias + panel * NR + VL);
        for (int i = 0; i < M; ++i) acc[i][0] = acc[i][0] + b0, acc[i][1] = acc[i][1] + b1;
    }
    const long first = panel * m.width();
    const int n = static_cast<int>(std::min(m.width(), m.n - first));
    for (int i = 0; i < M; ++i) {
        float* out = p.y + (row + i) * p.ldy + first;
        if (p.then == Then::swiglu) {
            v_store_n(out, silu(acc[i][0]) * acc[i][1], n);
            continue;
        }
        const int n0 = std::min(n, VL), n1 = n - n0;
        if (p.then == Then::add) {
            acc[i][0] = v_load_n(out, n0) + acc[i][0];
            if (n1) acc[i][1] = v_load_n(out + VL, n1) + acc[i][1];
        }
        v_store_n(out, acc[i][0], n0);
        if (n1) v_store_n(out + VL, acc[i][1], n1);
    }
}
