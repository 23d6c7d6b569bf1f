// y = x W^T by the processor's tiles: weights of 8 bits with a scale for each output, inputs of 16 bits, as two digits, with
// a scale for each row. All products of an output are summed exactly, in int32, and scaled once: what happens in which
// order does not matter.
#include <algorithm>
#include <cmath>

#include "linear.h"
#include "rows.h"
#include "store.h"

#if defined(TILES)

namespace {

void fetch(const char* at, long bytes) {
    for (long j = 0; j < bytes; j += 64) prefetch(at + j);
}

// A tile of 8 bits out of one of 4. `soon`: where one lies that is asked for meanwhile, line by line; too many at a time
// would wait for each other.
void widen(const unsigned char* from, unsigned char* to, const char* soon) {
    const vi nibble = _mm512_set1_epi16(15);
    auto about = [&](long i) {  // of output o in both halves of lane o
        const vi words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i));
        return _mm512_or_si512(words, _mm512_slli_epi32(words, 16));
    };
    const vi step[2] = {about(0), about(1)}, least[2] = {about(2), about(3)};
    auto bytes = [&](vi even, vi odd, int half) {
        even = _mm512_add_epi16(_mm512_mullo_epi16(even, step[half]), least[half]);
        odd = _mm512_add_epi16(_mm512_mullo_epi16(odd, step[half]), least[half]);
        return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, _mm512_srli_epi16(even, 7), _mm512_slli_epi16(odd, 1));
    };
    from += 8 * EDGE;
#pragma GCC unroll 2
    for (long i = 0; i < TILE_BYTES / 2; i += 64) {
        prefetch(soon + i);
        if (i % 256 == 0) prefetch(soon + TILE_BYTES / 2 + i / 4);
        const vi both = i_load(from + i);
        i_store(to + i, bytes(_mm512_and_si512(both, nibble), _mm512_and_si512(_mm512_srli_epi16(both, 8), nibble), 0));
        i_store(to + TILE_BYTES / 2 + i,
                bytes(_mm512_and_si512(_mm512_srli_epi16(both, 4), nibble), _mm512_srli_epi16(both, 12), 1));
    }
}

// EDGE rows times the NR outputs of a panel, TILE_K inputs of them, into four tiles: high digits, then low ones, which lie
// k behind.
void multiply(const unsigned char* w, const std::int8_t* x, long k) {
    settle(w);
    _tile_loadd(4, x, 2 * k);
    _tile_loadd(6, w, TILE_K);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, w + TILE_BYTES, TILE_K);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, x + k, 2 * k);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
}

void finish(const Product& p, long panel, long row, long rows) {
    const RowsOfDigits& x = p.low->digits;
    alignas(64) std::int32_t sums[4][EDGE][EDGE];
    _tile_stored(0, sums[0], TILE_K);
    _tile_stored(1, sums[1], TILE_K);
    _tile_stored(2, sums[2], TILE_K);
    _tile_stored(3, sums[3], TILE_K);
    const float* scales = reinterpret_cast<const float*>(p.m.panel(panel));
    const vf scale[2] = {v_load(scales), v_load(scales + VL)};
    for (long r = 0; r < std::min(rows, EDGE); ++r) {
        vf one[1][2];
        for (int half = 0; half < 2; ++half) {
            const vf high = i_float(i_load(sums[half][r])), low = i_float(i_load(sums[2 + half][r]));
            one[0][half] = v_fma(high, v_set(256.0f), low) * (scale[half] * v_set(x.scale(row + r)));
        }
        store<1>(p, panel, row + r, one);
    }
}

// At most EDGE rows: a panel's tiles go from memory to the tiles' unit; those of 4 bits by way of the vector unit, which
// makes a step's while the step before the last is multiplied.
void few_rows(const Product& p, long row, long rows, long panel, const char* soon) {
    constexpr long SLOTS = 4;
    const Matrix& m = p.m;
    const RowsOfDigits& x = p.low->digits;
    const long late = m.format == Format::t4 ? 2 : 0, steps = x.k / TILE_K, bytes = 2 * m.tile_bytes();
    alignas(64) unsigned char wide[SLOTS][2 * TILE_BYTES];
    const unsigned char* w = m.panel(panel) + NR * 4;
    clear_tiles();
    for (long s = 0; s < steps + late; ++s) {
        if (late && s < steps) {
            widen(w + s * bytes, wide[s % SLOTS], soon + s * bytes);
            widen(w + s * bytes + TILE4_BYTES, wide[s % SLOTS] + TILE_BYTES, soon + s * bytes + TILE4_BYTES);
        } else if (s < steps) {
            fetch(soon + s * bytes, bytes);
        }
        const long due = s - late;
        if (due >= 0) multiply(late ? wide[due % SLOTS] : w + due * bytes, x.row(row) + due * TILE_K, x.k);
    }
    finish(p, panel, row, rows);
}

// Many: panels of 4 bits become 8 first; they stay in the second cache while all rows go by.
void many_rows(const Product& p, const Part& part, Buffers& mem, const char* ahead) {
    const Matrix& m = p.m;
    const RowsOfDigits& x = p.low->digits;
    const long steps = x.k / TILE_K, size = steps * 2 * TILE_BYTES, tiles = (part.rows + EDGE - 1) / EDGE;
    auto wide = [&](long i) { return m.panel(part.panel + i) + NR * 4; };
    if (m.format == Format::t4) {
        grow(mem.tiles, part.panels * size);
        for (long i = 0; i < part.panels; ++i)
            for (long t = 0; t < 2 * steps; ++t)
                widen(wide(i) + t * TILE4_BYTES, mem.tiles.data() + i * size + t * TILE_BYTES,
                      ahead + i * m.panel_bytes() + t * TILE4_BYTES);
    }
    const long step = m.format == Format::t4 ? 0 : (m.panel_bytes() / (tiles * steps) + 63) / 64 * 64;
    for (long row = part.row, stop = row + part.rows; row < stop; row += EDGE)
        for (long i = 0; i < part.panels; ++i) {
            const unsigned char* w = m.format == Format::t4 ? mem.tiles.data() + i * size : wide(i);
            clear_tiles();
            for (long s = 0; s < steps; ++s, ahead += step) {
                fetch(ahead, step);
                multiply(w + s * 2 * TILE_BYTES, x.row(row) + s * TILE_K, x.k);
            }
            finish(p, part.panel + i, row, stop - row);
        }
}

}  // namespace

void linear_tiles(const Product& p, const Part& part, Buffers& mem, const char* ahead) {
    if (part.rows > EDGE) return many_rows(p, part, mem, ahead);
    for (long i = 0; i < part.panels; ++i) {
        const bool last = i + 1 == part.panels;
        few_rows(p, part.row, part.rows, part.panel + i,
                 last ? ahead : reinterpret_cast<const char*>(p.m.panel(part.panel + i + 1)));
    }
}

void RowsOfDigits::set(long row, const float* x) {
    Extent extent;
    for (long i = 0; i < given_; i += VL) extent.see(v_load_n(x + i, static_cast<int>(given_ - i)));
    constexpr float TOP = 127 * 256 + 127;
    const float largest = extent.largest();
    // Smaller ones would have no finite inverse, and nothing to say.
    const vf inverse = v_set(largest > 1e-30f ? TOP / largest : 0.0f);
    std::int8_t *high = digits_.data() + row * 2 * k, *low = high + k;
    for (long i = 0; i < k; i += VL) {
        const vf scaled = v_load_n(x + i, static_cast<int>(given_ - i)) * inverse;
        const vi q = _mm512_cvtps_epi32(v_max(v_min(scaled, v_set(TOP)), v_set(-TOP)));
        const vi h = _mm512_srai_epi32(_mm512_add_epi32(q, i_set(128)), 8), l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 8));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(h));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + i), _mm512_cvtepi32_epi8(l));
    }
    scales_[row] = largest / TOP + extent.ill();
}

#else

void linear_tiles(const Product&, const Part&, Buffers&, const char*) {}
void RowsOfDigits::set(long, const float*) {}

#endif

void RowsOfDigits::shape(long rows, long inputs) {
    given_ = inputs, k = round_up(inputs, TILE_K), rows = round_up(rows, EDGE);
    grow(digits_, rows * 2 * k), grow(scales_, rows);
}
