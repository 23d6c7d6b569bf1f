// Softmax in segments of SEG keys (Milakov & Gimelshein 2018), VL rows at a time; what a row gets depends on that row alone.
#pragma once
#include <algorithm>
#include <limits>

#include "simd.h"

constexpr long SEG = 64;
static_assert(SEG % NR == 0);

// Scores of SEG keys of at most VL rows become weights e^(s - most), zero from `visible(row)` on.
// put(row, weights) takes them; most and sum are set. WHOLE: all are visible; SHORT: the weights become 16 bits.
template <bool WHOLE, bool SHORT, class Visible, class Put>
static inline void soften_some(const float* scores, int rows, Visible&& visible, float* most, float* sum, Put&& put) {
    constexpr int N = SEG / VL;
    auto keep = [](vf v, int n, float other) { return WHOLE ? v : v_keep(v, n, v_set(other)); };
    vf all[VL];
    for (int r = 0; r < rows; ++r) {
        const int n = WHOLE ? SEG : static_cast<int>(visible(r));
        vf top = v_set(-std::numeric_limits<float>::infinity());
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j)
            top = v_max(top, keep(v_load(scores + r * SEG + j * VL), n - j * VL, -std::numeric_limits<float>::infinity()));
        all[r] = top;
    }
    for (int r = rows; r < VL; ++r) all[r] = v_zero();
    v_store_n(most, v_mosts(all), rows);
    for (int r = 0; r < rows; ++r) {
        const int n = WHOLE ? SEG : static_cast<int>(visible(r));
        const vf top = v_set(most[r]);
        vf weights[N], total = v_zero();
#pragma GCC unroll 4
        for (int j = 0; j < N; ++j) {
            const vf x = v_load(scores + r * SEG + j * VL) - top;
            weights[j] = keep(SHORT ? v_exp_short(x) : v_exp(x), n - j * VL, 0.0f);
            total = total + weights[j];
        }
        put(r, weights);
        all[r] = total;
    }
    v_store_n(sum, v_sums(all), rows);
}
template <bool SHORT, class Visible, class Put>
static inline void soften(const float* scores, long rows, Visible&& visible, float* most, float* sum, Put&& put) {
    for (long r = 0; r < rows; r += VL) {
        const int some = static_cast<int>(std::min<long>(VL, rows - r));
        bool whole = true;
        for (int i = 0; i < some; ++i) whole = whole && visible(r + i) == SEG;
        auto visible_here = [&](int i) { return visible(r + i); };
        auto put_here = [&](int i, vf (&weights)[SEG / VL]) { put(r + i, weights); };
        const float* from = scores + r * SEG;
        if (whole)
            soften_some<true, SHORT>(from, some, visible_here, most + r, sum + r, put_here);
        else
            soften_some<false, SHORT>(from, some, visible_here, most + r, sum + r, put_here);
    }
}

// (most, sum, out) of what is left of a segment, and of the segment, become those of both, row by row.
static inline void merge(long rows, float* most, float* sum, float* out, const float* seg_most, const float* seg_sum,
                         const float* seg_out, long width) {
    for (long r = 0; r < rows; r += VL) {
        const int some = static_cast<int>(std::min<long>(VL, rows - r));
        const vf before = v_load_n(most + r, some), here = v_load_n(seg_most + r, some), both = v_max(before, here);
        const vf a = v_exp(before - both), b = v_exp(here - both);
        v_store_n(sum + r, v_load_n(sum + r, some) * a + v_load_n(seg_sum + r, some) * b, some);
        v_store_n(most + r, both, some);
        float old_scale[VL], new_scale[VL];
        v_store(old_scale, a), v_store(new_scale, b);
        for (int i = 0; i < some; ++i) {
            float* to = out + (r + i) * width;
            const float* from = seg_out + (r + i) * width;
            const vf x = v_set(old_scale[i]), y = v_set(new_scale[i]);
            for (long j = 0; j < width; j += VL) v_store(to + j, v_fma(v_load(from + j), y, v_load(to + j) * x));
        }
    }
}
