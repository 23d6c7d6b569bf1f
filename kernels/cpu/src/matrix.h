// A linear layer's weights, packed: in float32, or as they lie in the file, which is exact and takes a half to an eighth
// of the bytes. What is in the file is a number for each weight, or one for each and a scale (and least value) for each
// GROUP along k; float32 comes out of it by the arithmetic that the file's format defines, a panel at a time.
#pragma once
#include <cstdint>

#include "arena.h"
#include "bytes.h"
#include "pool.h"
#include "tiles.h"

constexpr long GROUP = 32;  // weights of a row that have a scale in common, as in llama.cpp's formats

// Rows of weights as they come: float32, half precisions, or blocks of GROUP of llama.cpp's formats.
enum class Source { f32, f16, bf16, q8_0, q4_0, q4_1 };

// How they lie here. A panel holds NR outputs, and k runs in memory:
//   f32, f16, bf16: [k][NR]
//   q8: [groups] of { f16 scale [NR], bytes [GROUP / 4][NR][4] }, weight = scale * (byte - 128)
//   q4: [groups] of { f16 scale [NR], f16 least [NR], bytes [GROUP / 4][VL][4] }, weight = scale * half byte + least;
//       the low halves are the outputs 0 .. VL, the high ones VL .. NR
//   p16: [NR / EDGE][groups, an even number] of { bf16 [EDGE][EDGE][2] }
//   p8: the same with { f16 scale [EDGE], bytes [EDGE][EDGE][2] }, weight = scale * byte, which has a sign
//   p4: the same with { f16 scale [EDGE], f16 rest [EDGE], 16 bits [EDGE / 4][EDGE][2] }; a quarter of the 16 bits is a row
//       of bytes in p8, the low ones are the rows 0, 4, 8 and 12. Behind all groups of a strip { bytes 16 - zero [EDGE] } for
//       each; weight = scale * (quarter - zero) + rest. The zero is the quarter that stands for about 0, so that where a
//       weight is small both terms are.
//   t8: f32 scale [NR], then [k / TILE_K][NR / EDGE] tiles: bytes [TILE_K / 4][EDGE][4], weight = scale * byte, which has a sign
//   t4: the same with tiles made of less: { 16 bits step [2][EDGE], least [2][EDGE], bytes [TILE_K / 8][EDGE][4] }, for the
//       first and the second GROUP of TILE_K; byte of a t8 tile = (step * half byte + least) / 128, rounded down; the low
//       halves are the first GROUP
enum class Format { f32, f16, bf16, q8, q4, p16, p8, p4, t8, t4 };

// How its products are taken: in float32 (linear.cpp), as accurately by the processor's matrix tiles (linear_parts.cpp; the
// format is p16, p8 or p4 then), in whole numbers (linear8.cpp; q8 or q4), or in whole numbers by tiles (linear_tiles.cpp).
enum class Products { floats, parts, whole, tiles };
static inline bool by_tiles(Products by) { return by == Products::parts || by == Products::tiles; }

// With `pairs` the matrix is gate over up ([2n, k] packed so that a panel holds VL gates and their VL ups).
struct Matrix {
    long n = 0, k = 0;  // outputs (of a pair: one), inputs
    bool pairs = false;
    Products by = Products::floats;
    Format format = Format::f32;
    unsigned char* panels = nullptr;
    float* bias = nullptr;  // packed like a panel with k = 1, or null

    long width() const { return pairs ? VL : NR; }
    long count() const { return (n + width() - 1) / width(); }
    long groups() const { return (k + GROUP - 1) / GROUP; }
    long group_bytes() const {
        if (format == Format::q8) return NR * (2 + GROUP);
        if (format == Format::q4) return NR * (4 + GROUP / 2);
        return NR * GROUP * (format == Format::f32 ? 4 : 2);
    }
    // In strips groups go in pairs, and the last may be there only to make one.
    long pairs_of_groups() const { return (groups() + 1) / 2; }
    // Of a group of EDGE outputs, and of all of them.
    static constexpr long unit_bytes(Format f) {
        return EDGE * (f == Format::p16 ? 2 * GROUP : f == Format::p8 ? 2 + GROUP : 4 + GROUP / 2);
    }
    long unit_bytes() const { return unit_bytes(format); }
    long strip_bytes() const {
        return round_up(2 * pairs_of_groups() * (unit_bytes() + (format == Format::p4 ? EDGE : 0)), 64);
    }
    long zeros_at(long group) const { return 2 * pairs_of_groups() * unit_bytes() + group * EDGE; }  // in a strip of p4
    bool in_strips() const { return format == Format::p16 || format == Format::p8 || format == Format::p4; }
    long panel_bytes() const {
        if (format == Format::t8 || format == Format::t4) return NR * 4 + round_up(k, TILE_K) / TILE_K * 2 * tile_bytes();
        if (in_strips()) return NR / EDGE * strip_bytes();
        return format == Format::q8 || format == Format::q4 ? groups() * group_bytes() : group_bytes() / GROUP * k;
    }
    long tile_bytes() const { return format == Format::t4 ? TILE4_BYTES : TILE_BYTES; }
    const unsigned char* panel(long i) const { return panels + i * panel_bytes(); }

    // rows[i]: where output i's weights lie, gates before ups. `arena` owns what is packed. Files in q4 or q8 stay as they
    // are; to be `whole` the others become q8: byte = weight / scale to nearest, scale = largest / 127. For `tiles` all do,
    // with a scale for a whole row; what the file has in 4 bits is kept in 4 and becomes 8 when it is used.
    // Throws std::range_error: q4_0 with a scale above 8188.
    void pack(Source source, const void* const* rows, const float* bias, Pool& pool, Arena& arena);
    // weight[row, 0..k) in float32
    void row(long row, float* out) const;
    // [count, NR] float32 of a panel from input `first` on; of q4 and q8 in whole groups, not of those by tiles
    void unpack(long panel, long first, long count, float* out) const;
};
