// The products of a segment of attention (attention.h) in bfloat16 with sums in float32: by the processor's matrix tiles (AMX),
// or by the vector unit's products of pairs (AVX-512 BF16), which read the same layouts. An element is one chain over dims or
// keys, ascending, whatever rows stand beside it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "attention.h"
#include "tiles.h"

constexpr long TILE_NUMBERS = TILE_BYTES / 2;  // bf16s of a tile
constexpr long PAIRS = TILE_K / 4;             // rows of a right side: pairs of neighbouring dims or keys
constexpr int FEW = 6;

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define BF16_PRODUCTS 1
#endif

// Whether it takes heads of this size.
static inline bool bf16_fits(long dim) { return *bf16_simd() && dim % (TILE_K / 2) == 0; }

// Right sides. keys [SEG] rows of dim -> [dim / 32][SEG / EDGE] tiles.
// values [SEG] rows of dim -> [SEG / 32][dim / EDGE] tiles: of 32 dims first the even, then the odd ones; those of the first
// `there` keys, an even number. `coming` is called between: memory that waits for nobody is memory that idles.
template <class Coming>
void tile_keys(const std::uint16_t* const* keys, long dim, std::uint16_t* to, Coming&& coming);
template <class Coming>
void tile_values(const std::uint16_t* const* values, long there, long dim, std::uint16_t* to, Coming&& coming);

// q [rows, dim], scaled, against one segment: most, sum and out [rows, dim] (weighted values, dims in the order of
// tile_values) as in softmax.h. Whole tiles of rows are read from q and written to out. done(row, rows): these are ready.
template <class Visible, class Done>
void tile_rows(long rows, const std::uint16_t* q, long dim, const std::uint16_t* keys, const std::uint16_t* values,
               Visible&& visible, float* most, float* sum, float* out, Done&& done);
// The same for up to EDGE rows whose scores [EDGE, SEG] are there; the rows that count begin at `scores`. `there`: SEG, or SEG / 2
// where no row sees more keys.
template <class Visible>
void tile_some_rows(long rows, const float* scores, long there, long dim, const std::uint16_t* values, Visible&& visible,
                    float* most, float* sum, float* out);
// For few rows keys cost more than queries. By matrix tiles they go as they lie, EDGE of them at a time with `stride` bytes
// between, and the queries are turned. q: [dim / 32] right sides, of tile_queries. scores [EDGE, SEG] from column `first` on.
void tile_queries(long rows, const std::uint16_t* q, long dim, std::uint16_t* to);
void tile_scores_of(const std::uint16_t* keys, long stride, const std::uint16_t* q, long rows, long dim, long first, float* scores);
// scores [rows, SEG] = q [rows, dim] keys^T, of up to EDGE rows; matrix tiles read and write all EDGE.
void tile_scores(long rows, const std::uint16_t* q, long dim, const std::uint16_t* keys, float* scores);
// out [rows, dim] = weights [rows, SEG] values; those from `there` on, which is SEG or SEG / 2, are zero
void tile_sums(long rows, const std::uint16_t* weights, const std::uint16_t* values, long there, long dim, float* out);
// Up to FEW rows by the vector unit: keys and values are used as they come, which costs less than to write tiles of them.
// most, sum and out as in tile_some_rows; no row sees more than `there` keys.
template <class Visible, class Coming>
void few_rows(long rows, const std::uint16_t* q, long dim, const std::uint16_t* const* keys, const std::uint16_t* const* values,
              long there, Visible&& visible, float* most, float* sum, float* out, Coming&& coming);
// n floats times `by` become bf16, to nearest, ties to even; n is a multiple of 32.
void tile_narrow(const float* from, float by, long n, std::uint16_t* to);
// out = from / sum, in their natural order
void tile_finish(const float* from, float sum, long dim, float* out);

#if defined(BF16_PRODUCTS)
#include "transpose.h"

template <class Coming>
void tile_keys(const std::uint16_t* const* keys, long dim, std::uint16_t* to, Coming&& coming) {
    for (long i = 0; i < dim; i += TILE_K / 2)
        for (long j = 0; j < SEG; j += EDGE, to += TILE_NUMBERS) {
            vf a[VL];
            for (long r = 0; r < EDGE; ++r) {
                if (r % 4 == 0) coming();
                a[r] = v_bits(keys[j + r] + i);
            }
            turn(a);
            for (long r = 0; r < EDGE; ++r) v_store(reinterpret_cast<float*>(to) + r * EDGE, a[r]);
        }
}

// Of two keys' values 2 * EDGE dims each: the pairs of the even dims, and of the odd ones.
static inline void pair_up(const std::uint16_t* first, const std::uint16_t* second, vi& even, vi& odd) {
    const vi a = i_load(first), b = i_load(second);
    even = _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
    odd = _mm512_mask_blend_epi16(0x55555555u, b, _mm512_srli_epi32(a, 16));
}

template <class Coming>
void tile_values(const std::uint16_t* const* values, long there, long dim, std::uint16_t* to, Coming&& coming) {
    const long tiles = dim / EDGE;
    for (long j = 0; j < there; j += 2) {
        coming();
        std::uint16_t* row = to + j / 2 / PAIRS * tiles * TILE_NUMBERS + j / 2 % PAIRS * 2 * EDGE;
        for (long i = 0; i < dim; i += TILE_K / 2, row += 2 * TILE_NUMBERS) {
            vi even, odd;
            pair_up(values[j] + i, values[j + 1] + i, even, odd);
            i_store(row, even), i_store(row + TILE_NUMBERS, odd);
        }
    }
}

// Scores become weights [rows, SEG] in bf16.
template <class Visible>
static inline void soften_to_bf16(const float* scores, long rows, Visible&& visible, float* most, float* sum,
                                  std::uint16_t* weights) {
    soften<true>(scores, rows, visible, most, sum, [&](long i, const vf (&w)[SEG / VL]) {
        for (long j = 0; j < SEG / VL; j += 2)
            i_store(weights + i * SEG + j * VL, (vi)_mm512_cvtne2ps_pbh(w[j + 1], w[j]));
    });
}

template <class Visible>
void tile_some_rows(long rows, const float* scores, long there, long dim, const std::uint16_t* values, Visible&& visible,
                    float* most, float* sum, float* out) {
    alignas(64) std::uint16_t weights[EDGE * SEG];
    soften_to_bf16(scores, rows, visible, most, sum, weights);
    tile_sums(rows, weights, values, there, dim, out);
}

// sum + the products of one pair, in every lane, with the lanes' pairs.
static inline vf dot_pair(vf sum, const std::uint16_t* pair, vi pairs) {
    std::int32_t both;
    std::memcpy(&both, pair, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)i_set(both), (__m512bh)pairs);
}

template <int M, class Coming>
void few_scores(const std::uint16_t* q, long dim, const std::uint16_t* const* keys, long there, float* scores, Coming&& coming) {
    for (long j = 0; j < there; j += EDGE) {
        vf acc[M];
        for (int m = 0; m < M; ++m) acc[m] = v_zero();
        for (long i = 0; i < dim; i += TILE_K / 2) {
            vf a[VL];
            for (int r = 0; r < EDGE; ++r) a[r] = v_bits(keys[j + r] + i);
            for (int r = 0; r < EDGE; r += 4) coming();
            turn(a);
#pragma GCC unroll 16
            for (int r = 0; r < EDGE; ++r)
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) acc[m] = dot_pair(acc[m], q + m * dim + i + 2 * r, _mm512_castps_si512(a[r]));
        }
        for (int m = 0; m < M; ++m) v_store(scores + m * SEG + j, acc[m]);
    }
}

// H: how often 2 * EDGE dims.
template <int M, int H, class Coming>
void few_sums(const std::uint16_t* weights, const std::uint16_t* const* values, long there, long dim, long first, float* out,
              Coming&& coming) {
    vf acc[M][2 * H];
    for (int m = 0; m < M; ++m)
        for (int h = 0; h < 2 * H; ++h) acc[m][h] = v_zero();
    for (long j = 0; j < there; j += 2) {
        coming();
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) {
            vi even, odd;
            pair_up(values[j] + first + h * 2 * EDGE, values[j + 1] + first + h * 2 * EDGE, even, odd);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
                acc[m][2 * h] = dot_pair(acc[m][2 * h], weights + m * SEG + j, even);
                acc[m][2 * h + 1] = dot_pair(acc[m][2 * h + 1], weights + m * SEG + j, odd);
            }
        }
    }
    for (int m = 0; m < M; ++m)
        for (int h = 0; h < 2 * H; ++h) v_store(out + m * dim + first + h * EDGE, acc[m][h]);
}

template <int M, class Visible, class Coming>
void few_of(const std::uint16_t* q, long dim, const std::uint16_t* const* keys, const std::uint16_t* const* values, long there,
            Visible& visible, float* most, float* sum, float* out, Coming& coming) {
    alignas(64) float scores[M * SEG];
    alignas(64) std::uint16_t weights[M * SEG];
    few_scores<M>(q, dim, keys, there, scores, coming);
    soften_to_bf16(scores, M, visible, most, sum, weights);
    long i = 0;
    for (; i + 4 * EDGE <= dim; i += 4 * EDGE) few_sums<M, 2>(weights, values, there, dim, i, out, coming);
    if (i < dim) few_sums<M, 1>(weights, values, there, dim, i, out, coming);
}

template <class Visible, class Coming, int... I>
auto pick_few(long rows, std::integer_sequence<int, I...>) {
    static constexpr decltype(&few_of<1, Visible, Coming>) table[] = {few_of<I + 1, Visible, Coming>...};
    return table[rows - 1];
}

template <class Visible, class Coming>
void few_rows(long rows, const std::uint16_t* q, long dim, const std::uint16_t* const* keys, const std::uint16_t* const* values,
              long there, Visible&& visible, float* most, float* sum, float* out, Coming&& coming) {
    pick_few<std::remove_reference_t<Visible>, std::remove_reference_t<Coming>>(rows, std::make_integer_sequence<int, FEW>())(
        q, dim, keys, values, there, visible, most, sum, out, coming);
}

template <class Visible, class Done>
void tile_rows(long rows, const std::uint16_t* q, long dim, const std::uint16_t* keys, const std::uint16_t* values,
               Visible&& visible, float* most, float* sum, float* out, Done&& done) {
    // The tiles' unit multiplies for the next rows while the vector unit does the softmax of these.
    alignas(64) float scores[2][EDGE * SEG];
    tile_scores(std::min(EDGE, rows), q, dim, keys, scores[0]);
    for (long r = 0; r < rows; r += EDGE) {
        const long next = r + EDGE;
        if (next < rows) tile_scores(std::min(EDGE, rows - next), q + next * dim, dim, keys, scores[next / EDGE % 2]);
        auto visible_here = [&](long i) { return visible(r + i); };
        tile_some_rows(std::min(EDGE, rows - r), scores[r / EDGE % 2], SEG, dim, values, visible_here, most + r, sum + r, out + r * dim);
        if (r) done(r - EDGE, EDGE);
    }
    const long last = (rows - 1) / EDGE * EDGE;
    done(last, rows - last);
}
#else
template <class Visible>
void tile_some_rows(long, const float*, long, long, const std::uint16_t*, Visible&&, float*, float*, float*) {}
template <class Visible, class Done>
void tile_rows(long, const std::uint16_t*, long, const std::uint16_t*, const std::uint16_t*, Visible&&, float*, float*, float*,
               Done&&) {}
template <class Visible, class Coming>
void few_rows(long, const std::uint16_t*, long, const std::uint16_t* const*, const std::uint16_t* const*, long, Visible&&, float*,
              float*, float*, Coming&&) {}
template <class Coming>
void tile_keys(const std::uint16_t* const*, long, std::uint16_t*, Coming&&) {}
template <class Coming>
void tile_values(const std::uint16_t* const*, long, long, std::uint16_t*, Coming&&) {}
#endif
