#include "attention_tiles.h"

#if defined(TILES)

void tile_scores(const std::uint16_t* q, long dim, const std::uint16_t* keys, float* scores) {
    static_assert(SEG == 4 * EDGE);
    settle(q);
    clear_tiles();
    for (long i = 0; i < dim; i += TILE_K / 2, keys += 4 * TILE_NUMBERS) {
        _tile_loadd(4, q + i, dim * 2);
        _tile_loadd(5, keys, TILE_K);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys + TILE_NUMBERS, TILE_K);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, keys + 2 * TILE_NUMBERS, TILE_K);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, keys + 3 * TILE_NUMBERS, TILE_K);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, scores, SEG * 4);
    _tile_stored(1, scores + EDGE, SEG * 4);
    _tile_stored(2, scores + 2 * EDGE, SEG * 4);
    _tile_stored(3, scores + 3 * EDGE, SEG * 4);
    settle(scores);
}

void tile_queries(long rows, const std::uint16_t* q, long dim, std::uint16_t* to) {
    for (long i = 0; i < dim; i += TILE_K / 2, to += TILE_NUMBERS) {
        vf a[VL];
        for (long r = 0; r < EDGE; ++r) a[r] = r < rows ? v_bits(q + r * dim + i) : v_zero();
        turn(a);
        for (long r = 0; r < EDGE; ++r) v_store(reinterpret_cast<float*>(to) + r * EDGE, a[r]);
    }
}

void tile_scores_of(const std::uint16_t* keys, long stride, const std::uint16_t* q, long dim, long first, float* scores) {
    alignas(64) float turned[EDGE * EDGE];
    settle(keys);
    _tile_zero(0);
    for (long i = 0; i < dim; i += TILE_K / 2, q += TILE_NUMBERS) {
        _tile_loadd(4, keys + i, stride);
        _tile_loadd(5, q, TILE_K);
        _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, turned, EDGE * 4);
    settle(turned);
    vf a[VL];
    for (long r = 0; r < EDGE; ++r) a[r] = v_load(turned + r * EDGE);
    turn(a);
    for (long r = 0; r < EDGE; ++r) v_store(scores + r * SEG + first, a[r]);
}

void tile_sums(const std::uint16_t* weights, const std::uint16_t* values, long dim, float* out) {
    static_assert(SEG == TILE_K);
    settle(weights);
    const long half = dim / EDGE * TILE_NUMBERS;  // the values of the second 32 keys
    _tile_loadd(4, weights, SEG * 2);
    _tile_loadd(5, weights + SEG / 2, SEG * 2);
    for (long i = 0; i < dim; i += 2 * EDGE, values += 2 * TILE_NUMBERS) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(6, values, TILE_K);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + TILE_NUMBERS, TILE_K);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, values + half, TILE_K);
        _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, values + half + TILE_NUMBERS, TILE_K);
        _tile_dpbf16ps(1, 5, 7);
        _tile_stored(0, out + i, dim * 4);
        _tile_stored(1, out + i + EDGE, dim * 4);
    }
    settle(out);
}

void tile_narrow(const float* from, float by, long n, std::uint16_t* to) {
    for (long i = 0; i < n; i += 2 * VL)
        i_store(to + i, (vi)_mm512_cvtne2ps_pbh(v_load(from + i + VL) * v_set(by), v_load(from + i) * v_set(by)));
}

void tile_finish(const float* from, float sum, long dim, float* out) {
    const vf total = v_set(sum);
    const vi low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), high = _mm512_or_si512(low, i_set(8));
    for (long i = 0; i < dim; i += 2 * EDGE) {
        const vf even = v_load(from + i) / total, odd = v_load(from + i + EDGE) / total;
        v_store(out + i, _mm512_permutex2var_ps(even, low, odd));
        v_store(out + i + EDGE, _mm512_permutex2var_ps(even, high, odd));
    }
}

#else

void tile_scores(const std::uint16_t*, long, const std::uint16_t*, float*) {}
void tile_sums(const std::uint16_t*, const std::uint16_t*, long, float*) {}
void tile_queries(long, const std::uint16_t*, long, std::uint16_t*) {}
void tile_scores_of(const std::uint16_t*, long, const std::uint16_t*, long, long, float*) {}
void tile_narrow(const float*, float, long, std::uint16_t*) {}
void tile_finish(const float*, float, long, float*) {}

#endif
