// Whole numbers beside simd.h's floats: a vector `vi` of VL int32, each of them also four neighbouring bytes. dot is
// exact in every variant, so all instruction sets see the same sums.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.h"

// IEEE half precision, for places where no instruction does it: exact to float, to nearest even from float.
static inline float half_to_float(std::uint16_t h) {
    const std::uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    std::uint32_t bits = rest >= 0x7c00u ? (rest << 13) + (112u << 23) + (112u << 23) : (rest << 13) + (112u << 23);
    float f;
    if (rest < 0x0400u) return (sign ? -1.0f : 1.0f) * static_cast<float>(rest) * 0x1p-24f;
    bits |= sign;
    std::memcpy(&f, &bits, 4);
    return f;
}
static inline std::uint16_t float_to_half(float f) {
    std::uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const std::uint16_t sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
    const std::uint32_t rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return sign | 0x7e00u;
    if (rest >= 0x477ff000u) return sign | 0x7c00u;
    if (rest < 0x38800000u) {  // a subnormal: the addition rounds for us
        float magnitude;
        std::memcpy(&magnitude, &rest, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return static_cast<std::uint16_t>(sign | (bits - 0x3f000000u));
    }
    return static_cast<std::uint16_t>(sign | ((rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13));
}
static inline float bfloat_to_float(std::uint16_t b) {
    const std::uint32_t bits = static_cast<std::uint32_t>(b) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static inline std::uint16_t float_to_bfloat(float f) {
    std::uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<std::uint16_t>((nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Numbers of 16 bits, so that the compiler tells them apart. They become float32 when they are loaded; what becomes one is
// rounded to nearest, ties to even.
struct Half {
    std::uint16_t bits;
};
struct Bfloat {
    std::uint16_t bits;
};

#if defined(__AVX512F__) && defined(__AVX512BW__)
static inline vi i_load(const void* p) { return _mm512_loadu_si512(p); }
static inline void i_store(void* p, vi v) { _mm512_storeu_si512(p, v); }
static inline vi i_set(std::int32_t x) { return _mm512_set1_epi32(x); }
static inline vf i_float(vi v) { return _mm512_cvtepi32_ps(v); }
// The low and the high half of every byte.
static inline vi i_low(vi v) { return _mm512_and_si512(v, _mm512_set1_epi32(0x0f0f0f0f)); }
static inline vi i_high(vi v) { return _mm512_and_si512(_mm512_srli_epi32(v, 4), _mm512_set1_epi32(0x0f0f0f0f)); }
// Bits [at, at + 8) and [at, at + 4) of every int32, as a float.
static inline vf i_byte(vi v, int at) {
    return i_float(_mm512_and_si512(_mm512_srli_epi32(v, at), _mm512_set1_epi32(255)));
}
static inline vf i_nibble(vi v, int at) {
    const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(v, at), table);  // looks at the four lowest bits only
}
static inline vf h_load(const std::uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf b_load(const std::uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline void h_store(std::uint16_t* p, vf v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// The lower and the higher half of each 32 bits.
static inline vf even(vf v, Half) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_castps_si512(v))); }
static inline vf odd(vf v, Half) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16)));
}
static inline vf even(vf v, Bfloat) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16)); }
static inline vf odd(vf v, Bfloat) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(-65536)));
}
// sum + the four products of u's bytes, without sign, with s's, with sign. u8: any u; u4: u < 16.
#if defined(__AVX512VNNI__)
static inline vi dot_u8(vi sum, vi u, vi s) { return _mm512_dpbusd_epi32(sum, u, s); }
static inline vi dot_u4(vi sum, vi u, vi s) { return _mm512_dpbusd_epi32(sum, u, s); }
#else
static inline vi dot_u4(vi sum, vi u, vi s) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(u, s), _mm512_set1_epi16(1)));
}
static inline vi dot_u8(vi sum, vi u, vi s) {  // in halves: 255 * 127 * 2 would saturate
    sum = dot_u4(sum, i_low(u), s);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(i_high(u), s), _mm512_set1_epi16(16)));
}
#endif

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
static inline vi i_load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline void i_store(void* p, vi v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
static inline vi i_set(std::int32_t x) { return _mm256_set1_epi32(x); }
static inline vf i_float(vi v) { return _mm256_cvtepi32_ps(v); }
static inline vi i_low(vi v) { return _mm256_and_si256(v, _mm256_set1_epi32(0x0f0f0f0f)); }
static inline vi i_high(vi v) { return _mm256_and_si256(_mm256_srli_epi32(v, 4), _mm256_set1_epi32(0x0f0f0f0f)); }
static inline vf i_byte(vi v, int at) {
    return i_float(_mm256_and_si256(_mm256_srli_epi32(v, at), _mm256_set1_epi32(255)));
}
static inline vf i_nibble(vi v, int at) {
    return i_float(_mm256_and_si256(_mm256_srli_epi32(v, at), _mm256_set1_epi32(15)));
}
static inline vf h_load(const std::uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline vf b_load(const std::uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline void h_store(std::uint16_t* p, vf v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline vf h_low(__m256i v) {  // of the lower half of each 32 bits; the higher ones are 0
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
static inline vf even(vf v, Half) { return h_low(_mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(65535))); }
static inline vf odd(vf v, Half) { return h_low(_mm256_srli_epi32(_mm256_castps_si256(v), 16)); }
static inline vf even(vf v, Bfloat) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16)); }
static inline vf odd(vf v, Bfloat) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(-65536)));
}
#if defined(__AVXVNNI__)
static inline vi dot_u8(vi sum, vi u, vi s) { return _mm256_dpbusd_avx_epi32(sum, u, s); }
static inline vi dot_u4(vi sum, vi u, vi s) { return _mm256_dpbusd_avx_epi32(sum, u, s); }
#else
static inline vi dot_u4(vi sum, vi u, vi s) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
static inline vi dot_u8(vi sum, vi u, vi s) {
    sum = dot_u4(sum, i_low(u), s);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(i_high(u), s), _mm256_set1_epi16(16)));
}
#endif

#else
static_assert(VL == 4, "integers and floats come from the same instruction set");
#define LANES for (int i = 0; i < VL; ++i)
static inline vi i_load(const void* p) { vi v; std::memcpy(&v, p, sizeof v); return v; }
static inline void i_store(void* p, vi v) { std::memcpy(p, &v, sizeof v); }
static inline vi i_set(std::int32_t x) { return vi{x, x, x, x}; }
static inline vf i_float(vi v) { vf f; LANES f[i] = static_cast<float>(v[i]); return f; }
static inline vi i_low(vi v) { return v & 0x0f0f0f0f; }
static inline vi i_high(vi v) { return (v >> 4) & 0x0f0f0f0f; }
static inline vf i_byte(vi v, int at) { return i_float((v >> at) & 255); }
static inline vf i_nibble(vi v, int at) { return i_float((v >> at) & 15); }
static inline vf h_load(const std::uint16_t* p) { vf f; LANES f[i] = half_to_float(p[i]); return f; }
static inline vf b_load(const std::uint16_t* p) { vf f; LANES f[i] = bfloat_to_float(p[i]); return f; }
static inline void h_store(std::uint16_t* p, vf v) { LANES p[i] = float_to_half(v[i]); }
static inline std::uint16_t word(vf v, int at) {
    std::uint16_t words[2 * VL];
    std::memcpy(words, &v, sizeof words);
    return words[at];
}
static inline vf even(vf v, Half) { vf f; LANES f[i] = half_to_float(word(v, 2 * i)); return f; }
static inline vf odd(vf v, Half) { vf f; LANES f[i] = half_to_float(word(v, 2 * i + 1)); return f; }
static inline vf even(vf v, Bfloat) { vf f; LANES f[i] = bfloat_to_float(word(v, 2 * i)); return f; }
static inline vf odd(vf v, Bfloat) { vf f; LANES f[i] = bfloat_to_float(word(v, 2 * i + 1)); return f; }
static inline vi dot_u8(vi sum, vi u, vi s) {
    std::uint8_t a[4 * VL];
    std::int8_t b[4 * VL];
    std::memcpy(a, &u, sizeof a), std::memcpy(b, &s, sizeof b);
    LANES for (int j = 0; j < 4; ++j) sum[i] += a[4 * i + j] * b[4 * i + j];
    return sum;
}
static inline vi dot_u4(vi sum, vi u, vi s) { return dot_u8(sum, u, s); }
#undef LANES
#endif

static inline float to_float(float x) { return x; }
static inline float to_float(Half x) { return half_to_float(x.bits); }
static inline float to_float(Bfloat x) { return bfloat_to_float(x.bits); }
static inline vf v_load(const Half* p) { return h_load(&p->bits); }
static inline vf v_load(const Bfloat* p) { return b_load(&p->bits); }
// VL times 32 bits, whatever they are.
static inline vf v_bits(const void* p) { return v_load(static_cast<const float*>(p)); }

static inline void narrow(const float* from, long n, float* to) { std::memcpy(to, from, n * sizeof(float)); }
static inline void narrow(const float* from, long n, Half* to) {
    long i = 0;
    for (; i + VL <= n; i += VL) h_store(&to[i].bits, v_load(from + i));
    for (; i < n; ++i) to[i].bits = float_to_half(from[i]);
}
static inline void narrow(const float* from, long n, Bfloat* to) {
    for (long i = 0; i < n; ++i) to[i].bits = float_to_bfloat(from[i]);
}

// Whole numbers in [-127, 127] become bytes.
static inline void to_bytes(vf v, std::int8_t* to) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
#else
    float a[VL];
    v_store(a, v);
    for (int i = 0; i < VL; ++i) to[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(a[i]));
#endif
}
