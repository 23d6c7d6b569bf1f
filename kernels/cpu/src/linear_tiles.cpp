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

// A tile of 8 bits out of one of 4, a quarter at a time. `soon`: where one lies that is asked for meanwhile, line by line; too
// many at a time would wait for each other.
class Widen {
  public:
    Widen(const unsigned char* from, unsigned char* to, const char* soon)
        : step_{about(from, 0), about(from, 1)}, least_{about(from, 2), about(from, 3)}, from_(from + 8 * EDGE), to_(to), soon_(soon) {}
    void quarter(long part) const {
        constexpr long SIZE = TILE_BYTES / 8;
        const vi nibble = _mm512_set1_epi16(15);
        if (part % 2) prefetch(soon_ + TILE_BYTES / 2 + part / 2 * 64);
#pragma GCC unroll 2
        for (long i = part * SIZE; i < (part + 1) * SIZE; i += 64) {
            prefetch(soon_ + i);
            const vi both = i_load(from_ + i);
            i_store(to_ + i, bytes(_mm512_and_si512(both, nibble), _mm512_and_si512(_mm512_srli_epi16(both, 8), nibble), 0));
            i_store(to_ + TILE_BYTES / 2 + i,
                    bytes(_mm512_and_si512(_mm512_srli_epi16(both, 4), nibble), _mm512_srli_epi16(both, 12), 1));
        }
    }

  private:
    static vi about(const unsigned char* from, long i) {  // of output o in both halves of lane o
        const vi words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i));
        return _mm512_or_si512(words, _mm512_slli_epi32(words, 16));
    }
    vi bytes(vi even, vi odd, int half) const {
        even = _mm512_add_epi16(_mm512_mullo_epi16(even, step_[half]), least_[half]);
        odd = _mm512_add_epi16(_mm512_mullo_epi16(odd, step_[half]), least_[half]);
        return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, _mm512_srli_epi16(even, 7), _mm512_slli_epi16(odd, 1));
    }

    const vi step_[2], least_[2];
    const unsigned char* from_;
    unsigned char* to_;
    const char* soon_;
};

// EDGE rows times the NR outputs of a panel, TILE_K inputs of them, into four tiles: high digits, then low ones, which lie
// k behind. meanwhile(i), i in [0, 4), is work for the vector unit: between the tiles' instructions, for a processor that works for
// two threads at a time does not look far enough ahead to find it behind them.
template <class Meanwhile>
[[gnu::always_inline]] inline void multiply(const unsigned char* w, const std::int8_t* x, long k, Meanwhile&& meanwhile) {
    settle(w);
    _tile_loadd(4, x, 2 * k);
    _tile_loadd(6, w, TILE_K);
    _tile_dpbssd(0, 4, 6);
    meanwhile(0);
    _tile_loadd(7, w + TILE_BYTES, TILE_K);
    _tile_dpbssd(1, 4, 7);
    meanwhile(1);
    _tile_loadd(5, x + k, 2 * k);
    _tile_dpbssd(2, 5, 6);
    meanwhile(2);
    _tile_dpbssd(3, 5, 7);
    meanwhile(3);
}

// The sums of a tile of rows and a panel on their way to y. Between the tiles' products, which the vector unit has no part in,
// there is time for some rows of the sums before.
class Sums {
  public:
    explicit Sums(const Product& p) : p_(p) {}
    // Those in the first four tiles.
    void take(long panel, long row, long rows) {
        some(EDGE);
        _tile_stored(0, sums_[0], TILE_K);
        _tile_stored(1, sums_[1], TILE_K);
        _tile_stored(2, sums_[2], TILE_K);
        _tile_stored(3, sums_[3], TILE_K);
        settle(sums_);
        panel_ = panel, row_ = row, at_ = 0, rows_ = std::min(rows, EDGE);
    }
    void some(long n) {
        if (at_ == rows_) return;
        const float* scales = reinterpret_cast<const float*>(p_.m.panel(panel_));
        const vf scale[2] = {v_load(scales), v_load(scales + VL)};
        for (const long end = std::min(rows_, at_ + n); at_ < end; ++at_) {
            const vf of_row = v_set(p_.low->digits.scale(row_ + at_));
            vf one[1][2];
            for (int half = 0; half < 2; ++half) {
                const vf high = i_float(i_load(sums_[half][at_])), low = i_float(i_load(sums_[2 + half][at_]));
                one[0][half] = v_fma(high, v_set(256.0f), low) * (scale[half] * of_row);
            }
            store<1>(p_, panel_, row_ + at_, one);
        }
    }

  private:
    alignas(64) std::int32_t sums_[4][EDGE][EDGE];
    const Product& p_;
    long panel_ = 0, row_ = 0, at_ = 0, rows_ = 0;
};

// At most EDGE rows: panels go from memory to the tiles' unit; those of 4 bits by way of the vector unit, which makes a step's
// while the step before the last is multiplied.
void few_rows(const Product& p, const Part& part, const char* ahead) {
    constexpr long SLOTS = 4;
    const Matrix& m = p.m;
    const RowsOfDigits& x = p.low->digits;
    const bool narrow = m.format == Format::t4;
    const long late = narrow ? 2 : 0, steps = x.k / TILE_K, units = part.panels * steps, bytes = 2 * m.tile_bytes();
    const long some = (EDGE + steps - 1) / steps;  // rows of sums in a step
    alignas(64) unsigned char slots[SLOTS][2 * TILE_BYTES];
    Sums sums(p);
    // Where the next step's weights, and those that are asked for, lie.
    const unsigned char* w = m.panel(part.panel) + NR * 4;
    const char* soon = part.panels == 1 ? ahead : reinterpret_cast<const char*>(m.panel(part.panel + 1));
    for (long u = 0, s = 0, panel = 0, due = 0, due_panel = part.panel; u < units + late; ++u) {
        auto finish = [&](long i) { sums.some((i + 1) * some / 4 - i * some / 4); };
        const std::int8_t* left = x.row(part.row) + due * TILE_K;
        if (u >= late && due == 0) clear_tiles();
        if (narrow) {
            const Widen one(w, slots[u % SLOTS], soon), two(w + TILE4_BYTES, slots[u % SLOTS] + TILE_BYTES, soon + TILE4_BYTES);
            auto widen = [&](long i) {
                const Widen& tile = i < 2 ? one : two;
                if (u < units) tile.quarter(i % 2 * 2), tile.quarter(i % 2 * 2 + 1);
            };
            if (u >= late)
                multiply(slots[(u - late) % SLOTS], left, x.k, [&](long i) { widen(i), finish(i); });
            else
                for (long i = 0; i < 4; ++i) widen(i);
        } else {
            fetch(soon, bytes);
            multiply(w, left, x.k, finish);
        }
        if (u >= late && ++due == steps) sums.take(due_panel++, part.row, part.rows), due = 0;
        if (u + 1 >= units) continue;
        w += bytes, soon += bytes;
        if (++s == steps) {
            s = 0, ++panel, w += NR * 4;
            soon = panel + 1 == part.panels ? ahead : soon + NR * 4;
        }
    }
    sums.some(EDGE);
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
            for (long t = 0; t < 2 * steps; ++t) {
                const Widen tile(wide(i) + t * TILE4_BYTES, mem.tiles.data() + i * size + t * TILE_BYTES,
                                 ahead + i * m.panel_bytes() + t * TILE4_BYTES);
                for (long j = 0; j < 4; ++j) tile.quarter(j);
            }
    }
    const long step = m.format == Format::t4 ? 0 : (m.panel_bytes() / (tiles * steps) + 63) / 64 * 64;
    Sums sums(p);
    for (long row = part.row, stop = row + part.rows; row < stop; row += EDGE)
        for (long i = 0; i < part.panels; ++i) {
            const unsigned char* w = m.format == Format::t4 ? mem.tiles.data() + i * size : wide(i);
            clear_tiles();
            for (long s = 0; s < steps; ++s, ahead += step) {
                fetch(ahead, step);
                multiply(w + s * 2 * TILE_BYTES, x.row(row) + s * TILE_K, x.k, [](long) {});
            }
            sums.take(part.panel + i, row, stop - row);
            sums.some(EDGE);
        }
}

}  // namespace

void linear_tiles(const Product& p, const Part& part, Buffers& mem, const char* ahead) {
    part.rows > EDGE ? many_rows(p, part, mem, ahead) : few_rows(p, part, ahead);
}

void RowsOfDigits::set(long row, const float* x) {
    Extent extent;
    for (long i = 0; i < given_; i += VL) extent.see(v_load_n(x + i, static_cast<int>(given_ - i)));
    constexpr float TOP = 127 * 256 + 127;
    const float largest = extent.largest();
    // Smaller ones would have no finite inverse, and nothing to say.
    const vf inverse = v_set(largest > 1e-30f ? TOP / largest : 0.0f);
    std::int8_t *high = digits_.data() + row * 2 * k, *low = high + k;
    const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (long i = 0; i < k; i += 4 * VL) {
        auto number = [&](long j) {
            return _mm512_cvtps_epi32(v_load_n(x + i + j * VL, static_cast<int>(given_ - i - j * VL)) * inverse);
        };
        // Numbers of 16 bits; packing takes 128 bits of each side in turn.
        const vi a = _mm512_packs_epi32(number(0), number(1)), b = _mm512_packs_epi32(number(2), number(3));
        const vi half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
        auto upper = [&](vi v) { return _mm512_srai_epi16(_mm512_add_epi16(v, half), 8); };
        const vi h = _mm512_packs_epi16(upper(a), upper(b));
        const vi l = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        i_store(high + i, _mm512_permutexvar_epi32(order, h)), i_store(low + i, _mm512_permutexvar_epi32(order, l));
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
