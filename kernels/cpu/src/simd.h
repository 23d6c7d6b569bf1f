// One vector type, `vf`, of VL floats: AVX-512, AVX2, or whatever the compiler makes of a 16-byte vector (NEON).
// Every operation is one IEEE operation on each lane, and fma is fused, so a lane's result never depends on its place.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define SIMD_NAME "avx512"
constexpr int VL = 16;
constexpr int MR = 12;  // rows of the largest tile: MR x 2 accumulators, 2 weights and 1 input fit 32 registers
using vf = __m512;
using vi = __m512i;
static inline vf v_zero() { return _mm512_setzero_ps(); }
static inline vf v_set(float x) { return _mm512_set1_ps(x); }
static inline vf v_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void v_store(float* p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }  // NaN in b stays
static inline vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf v_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for whole n in [-126, 127]: a product with that power of two, to the bit.
static inline vf v_scale(vf a, vf n) { return _mm512_scalef_ps(a, n); }
static inline __mmask16 v_first(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
// The first n lanes of a, the others of b.
static inline vf v_keep(vf a, int n, vf b) { return _mm512_mask_blend_ps(v_first(n), b, a); }
static inline vf v_load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(v_first(n), p); }
static inline void v_store_n(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, v_first(n), v); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define SIMD_NAME "avx2"
constexpr int VL = 8;
constexpr int MR = 6;
using vf = __m256;
using vi = __m256i;
static inline vf v_zero() { return _mm256_setzero_ps(); }
static inline vf v_set(float x) { return _mm256_set1_ps(x); }
static inline vf v_load(const float* p) { return _mm256_loadu_ps(p); }
static inline void v_store(float* p, vf v) { _mm256_storeu_ps(p, v); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf v_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf v_pow2(vf n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline vf v_scale(vf a, vf n) { return a * v_pow2(n); }
static inline __m256i v_first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf v_keep(vf a, int n, vf b) { return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(v_first(n))); }
static inline vf v_load_n(const float* p, int n) { return _mm256_maskload_ps(p, v_first(n)); }
static inline void v_store_n(float* p, vf v, int n) { _mm256_maskstore_ps(p, v_first(n), v); }

#else
#define SIMD_NAME "generic"
constexpr int VL = 4;
constexpr int MR = 8;
typedef float vf __attribute__((vector_size(16)));
typedef std::int32_t vi __attribute__((vector_size(16)));
#define LANES for (int i = 0; i < VL; ++i)
static inline vf v_zero() { return vf{}; }
static inline vf v_set(float x) { return vf{x, x, x, x}; }
static inline vf v_load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
static inline void v_store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
static inline vf v_fma(vf a, vf b, vf c) { LANES c[i] = __builtin_fmaf(a[i], b[i], c[i]); return c; }
#else
static inline vf v_fma(vf a, vf b, vf c) { return a * b + c; }  // no such instruction: two roundings, everywhere
#endif
static inline vf v_max(vf a, vf b) { LANES b[i] = a[i] > b[i] ? a[i] : b[i]; return b; }
static inline vf v_min(vf a, vf b) { LANES b[i] = a[i] < b[i] ? a[i] : b[i]; return b; }
static inline vf v_round(vf a) { LANES a[i] = __builtin_rintf(a[i]); return a; }
static inline vf v_pow2(vf n) {
    LANES {
        std::int32_t bits = ((std::int32_t)n[i] + 127) << 23;
        float f;
        std::memcpy(&f, &bits, 4);
        n[i] = f;
    }
    return n;
}
static inline vf v_scale(vf a, vf n) { return a * v_pow2(n); }
static inline vf v_keep(vf a, int n, vf b) { LANES b[i] = i < n ? a[i] : b[i]; return b; }
static inline vf v_load_n(const float* p, int n) { vf v{}; LANES if (i < n) v[i] = p[i]; return v; }
static inline void v_store_n(float* p, vf v, int n) { LANES if (i < n) p[i] = v[i]; }
#undef LANES
#endif

constexpr int NR = 2 * VL;  // outputs of a tile; weights are packed in panels of NR

static inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

// Horizontal operations go by halves, always the same way: lane i and lane i + half, in registers where they have names.
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
static inline __m128 v_low(__m256 v) { return _mm256_castps256_ps128(v); }
static inline __m128 v_high(__m256 v) { return _mm256_extractf128_ps(v, 1); }
static inline float v_sum(__m128 v) {
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}
static inline float v_most(__m128 v) {
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}
static inline float v_sum(__m256 v) { return v_sum(_mm_add_ps(v_low(v), v_high(v))); }
static inline float v_most(__m256 v) { return v_most(_mm_max_ps(v_low(v), v_high(v))); }
#endif
#if defined(__AVX512F__)
static inline __m256 v_low(__m512 v) { return _mm512_castps512_ps256(v); }
static inline __m256 v_high(__m512 v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
static inline float v_sum(__m512 v) { return v_sum(_mm256_add_ps(v_low(v), v_high(v))); }
static inline float v_most(__m512 v) { return v_most(_mm256_max_ps(v_low(v), v_high(v))); }
#elif !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
static inline float v_sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float v_most(vf v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
#endif

// The sums, and the largest ones, of VL vectors, in the order of v_sum.
#if defined(__AVX512F__) && defined(__AVX512BW__)
template <class F>
static inline vf v_fold(const vf (&a)[VL], F&& f) {
    auto pd = [](__m512 v) { return _mm512_castps_pd(v); };
    vf b[8], c[4], d[2];
    // Lanes i and i + 8, then i and i + 4, ...; vectors that meet are chosen so that the last step has them in their order.
    for (int i = 0; i < 8; ++i) {
        const int x = i >> 2 & 1, y = i >> 1 & 1, z = i & 1, first = y + 2 * x + 8 * z;
        b[i] = f(_mm512_shuffle_f32x4(a[first], a[first + 4], 0x44), _mm512_shuffle_f32x4(a[first], a[first + 4], 0xee));
    }
    for (int i = 0; i < 4; ++i)
        c[i] = f(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88), _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; ++i)
        d[i] = f(_mm512_castpd_ps(_mm512_unpacklo_pd(pd(c[2 * i]), pd(c[2 * i + 1]))),
                 _mm512_castpd_ps(_mm512_unpackhi_pd(pd(c[2 * i]), pd(c[2 * i + 1]))));
    return f(_mm512_shuffle_ps(d[0], d[1], 0x88), _mm512_shuffle_ps(d[0], d[1], 0xdd));
}
static inline vf v_sums(const vf (&a)[VL]) {
    return v_fold(a, [](vf x, vf y) { return x + y; });
}
static inline vf v_mosts(const vf (&a)[VL]) {
    return v_fold(a, [](vf x, vf y) { return v_max(x, y); });
}
#else
static inline vf v_sums(const vf (&a)[VL]) {
    float one[VL];
    for (int i = 0; i < VL; ++i) one[i] = v_sum(a[i]);
    return v_load(one);
}
static inline vf v_mosts(const vf (&a)[VL]) {
    float one[VL];
    for (int i = 0; i < VL; ++i) one[i] = v_most(a[i]);
    return v_load(one);
}
#endif

// e^x to 1 unit in the last place or so; x below -87.3 counts as -87.3, above 88 as 88. NaN stays NaN.
// Cody-Waite reduction to |r| <= ln(2) / 2, Taylor to r^7.
static inline vf v_exp(vf x) {
    x = v_min(v_set(88.0f), v_max(v_set(-87.3f), x));
    vf n = v_round(x * v_set(1.44269504088896341f));
    vf r = v_fma(n, v_set(-0.693359375f), x);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    return v_scale(p, n);
}
// The same to 1.1e-4, for x <= 0, where the result becomes one of 16 bits, which rounds ten times that away. 2^f on [-1/2, 1/2]
// with the least largest error, and e^0 = 1.
static inline vf v_exp_short(vf x) {
    x = v_max(v_set(-87.3f), x) * v_set(1.44269504088896341f);
    const vf n = v_round(x), f = x - n;
    vf p = v_set(0.0549948f);
    p = v_fma(p, f, v_set(0.24217782f));
    p = v_fma(p, f, v_set(0.69328089f));
    p = v_fma(p, f, v_set(1.0f));
    return v_scale(p, n);
}

// Into the second cache, for what is asked for may be more than the first one's 32 KB: on Zen 4 steps are 10-25% faster so, on
// Intel with AMX 5-10%. Zen 5 has 48 KB, and steps 10-20% faster by asking for it in the first.
#if defined(__AVX512F__) && defined(__AVXVNNI__) && !defined(__AMX_TILE__)
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
#else
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
#endif
