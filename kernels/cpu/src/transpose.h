// Rows of numbers of any kind become columns of float32.
#pragma once
#include "bytes.h"

// a[i] lane j becomes a[j] lane i: 32 bits that nobody looks into.
static inline void turn(vf (&a)[VL]) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    vf b[VL];
    for (int j = 0; j < 16; j += 2) {
        b[j] = _mm512_unpacklo_ps(a[j], a[j + 1]);
        b[j + 1] = _mm512_unpackhi_ps(a[j], a[j + 1]);
    }
    for (int j = 0; j < 16; j += 4) {
        a[j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[j]), _mm512_castps_pd(b[j + 2])));
        a[j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[j]), _mm512_castps_pd(b[j + 2])));
        a[j + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[j + 1]), _mm512_castps_pd(b[j + 3])));
        a[j + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[j + 1]), _mm512_castps_pd(b[j + 3])));
    }
    for (int j = 0; j < 4; ++j) {
        b[j] = _mm512_shuffle_f32x4(a[j], a[j + 4], 0x88), b[j + 4] = _mm512_shuffle_f32x4(a[j], a[j + 4], 0xdd);
        b[j + 8] = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88);
        b[j + 12] = _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xdd);
    }
    for (int j = 0; j < 4; ++j) {
        a[j] = _mm512_shuffle_f32x4(b[j], b[j + 8], 0x88), a[j + 4] = _mm512_shuffle_f32x4(b[j + 4], b[j + 12], 0x88);
        a[j + 8] = _mm512_shuffle_f32x4(b[j], b[j + 8], 0xdd);
        a[j + 12] = _mm512_shuffle_f32x4(b[j + 4], b[j + 12], 0xdd);
    }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    vf b[VL];
    for (int j = 0; j < 8; j += 2) {
        b[j] = _mm256_unpacklo_ps(a[j], a[j + 1]);
        b[j + 1] = _mm256_unpackhi_ps(a[j], a[j + 1]);
    }
    for (int j = 0; j < 8; j += 4) {
        a[j] = _mm256_shuffle_ps(b[j], b[j + 2], 0x44);
        a[j + 1] = _mm256_shuffle_ps(b[j], b[j + 2], 0xee);
        a[j + 2] = _mm256_shuffle_ps(b[j + 1], b[j + 3], 0x44);
        a[j + 3] = _mm256_shuffle_ps(b[j + 1], b[j + 3], 0xee);
    }
    for (int j = 0; j < 4; ++j) {
        b[j] = _mm256_permute2f128_ps(a[j], a[j + 4], 0x20);
        b[j + 4] = _mm256_permute2f128_ps(a[j], a[j + 4], 0x31);
    }
    for (int j = 0; j < 8; ++j) a[j] = b[j];
#else
    std::uint32_t from[VL][VL], to[VL][VL];
    std::memcpy(from, a, sizeof from);
    for (int i = 0; i < VL; ++i)
        for (int j = 0; j < VL; ++j) to[j][i] = from[i][j];
    std::memcpy(a, to, sizeof to);
#endif
}

// dst[i * ld + j] = rows[j][i] for first <= i < n, j < VL.
template <class T>
static inline void transpose(const T* const* rows, long first, long n, float* dst, long ld) {
    long i = first;
    vf a[VL];
    if constexpr (sizeof(T) == 2)  // two at a time: half the work
        for (; i + 2 * VL <= n; i += 2 * VL) {
            for (int j = 0; j < VL; ++j) a[j] = v_bits(rows[j] + i);
            turn(a);
            for (int j = 0; j < VL; ++j) {
                v_store(dst + (i + 2 * j) * ld, even(a[j], T{}));
                v_store(dst + (i + 2 * j + 1) * ld, odd(a[j], T{}));
            }
        }
    for (; i + VL <= n; i += VL) {
        for (int j = 0; j < VL; ++j) a[j] = v_load(rows[j] + i);
        turn(a);
        for (int j = 0; j < VL; ++j) v_store(dst + (i + j) * ld, a[j]);
    }
    for (; i < n; ++i)
        for (int j = 0; j < VL; ++j) dst[i * ld + j] = to_float(rows[j][i]);
}
