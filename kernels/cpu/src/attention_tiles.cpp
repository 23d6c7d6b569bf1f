#include "attention_tiles.h"

#include <utility>

#if defined(TILES)
namespace {

void amx_scores(const std::uint16_t* q, long dim, const std::uint16_t* keys, float* scores) {
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

void amx_sums(const std::uint16_t* weights, const std::uint16_t* values, long there, long dim, float* out) {
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
        if (there == SEG) {
            _tile_loadd(6, values + half, TILE_K);
            _tile_dpbf16ps(0, 5, 6);
            _tile_loadd(7, values + half + TILE_NUMBERS, TILE_K);
            _tile_dpbf16ps(1, 5, 7);
        }
        _tile_stored(0, out + i, dim * 4);
        _tile_stored(1, out + i + EDGE, dim * 4);
    }
    settle(out);
}

// The first four columns of [EDGE, EDGE].
void first_four(const float* from, vf (&a)[4]) {
    vf b[4];
    for (long i = 0; i < 4; ++i) {
        auto of = [&](long row) { return _mm_load_ps(from + row * EDGE); };
        b[i] = _mm512_castps128_ps512(of(i));
        b[i] = _mm512_insertf32x4(b[i], of(4 + i), 1);
        b[i] = _mm512_insertf32x4(b[i], of(8 + i), 2);
        b[i] = _mm512_insertf32x4(b[i], of(12 + i), 3);
    }
    auto pd = [](vf v) { return _mm512_castps_pd(v); };
    const vf low[2] = {_mm512_unpacklo_ps(b[0], b[1]), _mm512_unpacklo_ps(b[2], b[3])};
    const vf high[2] = {_mm512_unpackhi_ps(b[0], b[1]), _mm512_unpackhi_ps(b[2], b[3])};
    a[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(low[0]), pd(low[1])));
    a[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(low[0]), pd(low[1])));
    a[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(high[0]), pd(high[1])));
    a[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(high[0]), pd(high[1])));
}

}  // namespace

void tile_queries(long rows, const std::uint16_t* q, long dim, std::uint16_t* to) {
    for (long i = 0; i < dim; i += TILE_K / 2, to += TILE_NUMBERS) {
        vf a[VL];
        for (long r = 0; r < EDGE; ++r) a[r] = r < rows ? v_bits(q + r * dim + i) : v_zero();
        turn(a);
        for (long r = 0; r < EDGE; ++r) v_store(reinterpret_cast<float*>(to) + r * EDGE, a[r]);
    }
}

void tile_scores_of(const std::uint16_t* keys, long stride, const std::uint16_t* q, long rows, long dim, long first, float* scores) {
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
    if (rows <= 4) {
        vf a[4];
        first_four(turned, a);
        for (long r = 0; r < rows; ++r) v_store(scores + r * SEG + first, a[r]);
        return;
    }
    vf a[VL];
    for (long r = 0; r < EDGE; ++r) a[r] = v_load(turned + r * EDGE);
    turn(a);
    for (long r = 0; r < rows; ++r) v_store(scores + r * SEG + first, a[r]);
}

#else

void tile_queries(long, const std::uint16_t*, long, std::uint16_t*) {}
void tile_scores_of(const std::uint16_t*, long, const std::uint16_t*, long, long, long, float*) {}

#endif

#if defined(BF16_PRODUCTS)
namespace {

#if !defined(TILES)
void amx_scores(const std::uint16_t*, long, const std::uint16_t*, float*) {}
void amx_sums(const std::uint16_t*, const std::uint16_t*, long, long, float*) {}
#endif

// FEW rows at a time: 6 x 4 sums, 4 vectors of the right side and 1 pair of the left fit 32 registers.
// c [M, W * EDGE] = a [M, k] times W right sides that stand side by side; from one TILE_K / 2 of k to the next are `step` bf16s.
template <int M, int W>
void pairs(const std::uint16_t* a, long lda, long k, const std::uint16_t* b, long step, float* c, long ldc) {
    vf acc[M][W];
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < W; ++i) acc[m][i] = v_zero();
    for (long kk = 0; kk < k; kk += TILE_K / 2, b += step)
        for (long r = 0; r < PAIRS; ++r) {
            vi right[W];
#pragma GCC unroll 4
            for (int i = 0; i < W; ++i) right[i] = i_load(b + i * TILE_NUMBERS + r * 2 * EDGE);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
                for (int i = 0; i < W; ++i) acc[m][i] = dot_pair(acc[m][i], a + m * lda + kk + 2 * r, right[i]);
        }
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < W; ++i) v_store(c + m * ldc + i * EDGE, acc[m][i]);
}
using Pairs = void (*)(const std::uint16_t*, long, long, const std::uint16_t*, long, float*, long);
template <int W, int... I>
Pairs pick(long rows, std::integer_sequence<int, I...>) {
    static constexpr Pairs table[] = {pairs<I + 1, W>...};
    return table[rows - 1];
}
// c [rows, columns] = a [rows, k] times right sides [k / 32][columns / EDGE].
void all_pairs(long rows, const std::uint16_t* a, long k, const std::uint16_t* b, long columns, float* c) {
    constexpr auto sizes = std::make_integer_sequence<int, FEW>();
    const long step = columns / EDGE * TILE_NUMBERS;
    for (long row = 0, parts = (rows + FEW - 1) / FEW; parts > 0; --parts) {
        const long some = (rows - row + parts - 1) / parts;
        for (long j = 0; j < columns;) {
            const long wide = columns - j >= 4 * EDGE ? 4 : 2;
            (wide == 4 ? pick<4>(some, sizes) : pick<2>(some, sizes))(a + row * k, k, k, b + j / EDGE * TILE_NUMBERS, step,
                                                                      c + row * columns + j, columns);
            j += wide * EDGE;
        }
        row += some;
    }
}

}  // namespace

const char* bf16_simd() { return tiles_there() ? "amx-bf16" : "avx512-bf16"; }

void tile_scores(long rows, const std::uint16_t* q, long dim, const std::uint16_t* keys, float* scores) {
    tiles_there() ? amx_scores(q, dim, keys, scores) : all_pairs(rows, q, dim, keys, SEG, scores);
}

void tile_sums(long rows, const std::uint16_t* weights, const std::uint16_t* values, long there, long dim, float* out) {
    tiles_there() ? amx_sums(weights, values, there, dim, out) : all_pairs(rows, weights, SEG, values, dim, out);
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

const char* bf16_simd() { return ""; }
void tile_scores(long, const std::uint16_t*, long, const std::uint16_t*, float*) {}
void tile_sums(long, const std::uint16_t*, const std::uint16_t*, long, long, float*) {}
void tile_narrow(const float*, float, long, std::uint16_t*) {}
void tile_finish(const float*, float, long, float*) {}

#endif
