// The products of a segment of attention (attention.h) by the processor's tiles: bf16 in, sums in float32. An element is one
// chain over dims or keys, ascending, whatever rows stand beside it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "tiles.h"

constexpr long TILE_NUMBERS = TILE_BYTES / 2;  // bf16s of a tile
constexpr long PAIRS = TILE_K / 4;             // rows of a right side: pairs of neighbouring dims or keys

// Whether they take heads of this size.
static inline bool tiles_fit(long dim) { return tiles_there() && dim % (TILE_K / 2) == 0; }

// Right sides. keys [SEG] rows of dim -> [dim / 32][SEG / EDGE] tiles.
// values [SEG] rows of dim -> [SEG / 32][dim / EDGE] tiles: of 32 dims first the even, then the odd ones. `coming` is called
// between: memory that waits for nobody is memory that idles.
template <class Coming>
void tile_keys(const std::uint16_t* const* keys, long dim, std::uint16_t* to, Coming&& coming);
template <class Coming>
void tile_values(const std::uint16_t* const* values, long dim, std::uint16_t* to, Coming&& coming);

// q [rows, dim], scaled, against one segment: most, sum and out [rows, dim] (weighted values, dims in the order of
// tile_values) as in softmax.h. Whole tiles of rows are read from q and written to out. done(row, rows): these are ready.
template <class Visible, class Done>
void tile_rows(long rows, const std::uint16_t* q, long dim, const std::uint16_t* keys, const std::uint16_t* values,
               Visible&& visible, float* most, float* sum, float* out, Done&& done);
// The same for up to EDGE rows whose scores [EDGE, SEG] are there; the rows that count begin at `scores`.
template <class Visible>
void tile_some_rows(long rows, const float* scores, long dim, const std::uint16_t* values, Visible&& visible, float* most,
                    float* sum, float* out);
// For few rows keys cost more than queries: they go as they lie, EDGE of them at a time with `stride` bytes between, and the
// queries are turned. q: [dim / 32] right sides, of tile_queries. scores [EDGE, SEG] from column `first` on.
void tile_queries(long rows, const std::uint16_t* q, long dim, std::uint16_t* to);
void tile_scores_of(const std::uint16_t* keys, long stride, const std::uint16_t* q, long dim, long first, float* scores);
// scores [EDGE, SEG] = q [EDGE, dim] keys^T
void tile_scores(const std::uint16_t* q, long dim, const std::uint16_t* keys, float* scores);
// out [EDGE, dim] = weights [EDGE, SEG] values
void tile_sums(const std::uint16_t* weights, const std::uint16_t* values, long dim, float* out);
// n floats times `by` become bf16, to nearest, ties to even; n is a multiple of 32.
void tile_narrow(const float* from, float by, long n, std::uint16_t* to);
// out = from / sum, in their natural order
void tile_finish(const float* from, float sum, long dim, float* out);

#if defined(TILES)
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

template <class Coming>
void tile_values(const std::uint16_t* const* values, long dim, std::uint16_t* to, Coming&& coming) {
    const long tiles = dim / EDGE;
    for (long j = 0; j < SEG; j += 2) {
        coming();
        std::uint16_t* row = to + j / 2 / PAIRS * tiles * TILE_NUMBERS + j / 2 % PAIRS * 2 * EDGE;
        for (long i = 0; i < dim; i += TILE_K / 2, row += 2 * TILE_NUMBERS) {
            const vi a = i_load(values[j] + i), b = i_load(values[j + 1] + i);
            i_store(row, _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16)));
            i_store(row + TILE_NUMBERS, _mm512_mask_blend_epi16(0x55555555u, b, _mm512_srli_epi32(a, 16)));
        }
    }
}

template <class Visible>
void tile_some_rows(long rows, const float* scores, long dim, const std::uint16_t* values, Visible&& visible, float* most,
                    float* sum, float* out) {
    alignas(64) std::uint16_t weights[EDGE * SEG];
    soften<true>(scores, rows, visible, most, sum, [&](long i, const vf (&w)[SEG / VL]) {
        for (long j = 0; j < SEG / VL; j += 2)
            i_store(weights + i * SEG + j * VL, (vi)_mm512_cvtne2ps_pbh(w[j + 1], w[j]));
    });
    tile_sums(weights, values, dim, out);
}

template <class Visible, class Done>
void tile_rows(long rows, const std::uint16_t* q, long dim, const std::uint16_t* keys, const std::uint16_t* values,
               Visible&& visible, float* most, float* sum, float* out, Done&& done) {
    // The tiles' unit multiplies for the next rows while the vector unit does the softmax of these.
    alignas(64) float scores[2][EDGE * SEG];
    tile_scores(q, dim, keys, scores[0]);
    for (long r = 0; r < rows; r += EDGE) {
        if (r + EDGE < rows) tile_scores(q + (r + EDGE) * dim, dim, keys, scores[(r / EDGE + 1) % 2]);
        auto visible_here = [&](long i) { return visible(r + i); };
        tile_some_rows(std::min(EDGE, rows - r), scores[r / EDGE % 2], dim, values, visible_here, most + r, sum + r, out + r * dim);
        if (r) done(r - EDGE, EDGE);
    }
    const long last = (rows - 1) / EDGE * EDGE;
    done(last, rows - last);
}
#else
template <class Visible>
void tile_some_rows(long, const float*, long, const std::uint16_t*, Visible&&, float*, float*, float*) {}
template <class Visible, class Done>
void tile_rows(long, const std::uint16_t*, long, const std::uint16_t*, const std::uint16_t*, Visible&&, float*, float*, float*,
               Done&&) {}
template <class Coming>
void tile_keys(const std::uint16_t* const*, long, std::uint16_t*, Coming&&) {}
template <class Coming>
void tile_values(const std::uint16_t* const*, long, std::uint16_t*, Coming&&) {}
#endif
