// What works on single rows: RMSNorm, rotary embedding, the writes to the KV pool. One row, one thread, one order.
#pragma once
#include <cmath>

#include "simd.h"

// How large a row's numbers are.
class Extent {
  public:
    void see(vf v) {
        most_ = v_max(v_max(v, v_zero() - v), most_);
        ill_ = v_fma(v, v_zero(), ill_);
    }
    float largest() const { return v_most(most_); }
    float ill() const { return v_sum(ill_); }  // 0, or NaN where a NaN or an infinity was
    // Whose largest and whose sum those are
    vf most() const { return most_; }
    vf ills() const { return ill_; }

  private:
    vf most_ = v_zero(), ill_ = v_zero();
};

// out = x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019); out may be x.
static inline void rms_norm(const float* x, const float* weight, float eps, long n, float* out) {
    vf squares = v_zero();
    for (long i = 0; i < n; i += VL) {
        vf v = v_load_n(x + i, static_cast<int>(n - i));
        squares = v_fma(v, v, squares);
    }
    vf scale = v_set(1.0f / std::sqrt(v_sum(squares) / static_cast<float>(n) + eps));
    for (long i = 0; i < n; i += VL) {
        int left = static_cast<int>(n - i);
        v_store_n(out + i, v_load_n(x + i, left) * scale * v_load_n(weight + i, left), left);
    }
}

// Pairs (i, i + dim / 2) of x turned by the angles of `cs`: cos [dim / 2], then sin [dim / 2] (Su et al. 2021).
static inline void rotate(const float* x, const float* cs, long dim, float* out) {
    const long half = dim / 2;
    for (long i = 0; i < half; i += VL) {
        int left = static_cast<int>(half - i);
        vf a = v_load_n(x + i, left), b = v_load_n(x + half + i, left);
        vf c = v_load_n(cs + i, left), s = v_load_n(cs + half + i, left);
        v_store_n(out + i, v_fma(v_zero() - b, s, a * c), left);
        v_store_n(out + half + i, v_fma(a, s, b * c), left);
    }
}
