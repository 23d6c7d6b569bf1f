// y = x W^T in the accuracy of float32 by the processor's tiles, for weights that are bfloat16, or small whole numbers with a
// scale for each GROUP. Inputs are three bfloat16 parts whose sum they are (as in Henry, Tang & Heinecke 2019,
// arXiv:1904.06376); such a number is exact in bfloat16, so its products with parts are exact in float32, where the tile
// adds them up. An output is then one chain over groups, ascending: in p16 acc += sum, in p8 acc = fma(sum, scale, acc), in
// p4 also acc = fma(total of x, rest, acc). The tile does the same to a row whatever rows are beside it.
#include <algorithm>

#include "linear.h"
#include "store.h"

#if defined(TILES)

namespace {

// The unit of work is a group of EDGE outputs for a tile of rows.
constexpr int SLOTS = 4;   // units whose sums are under way, each in a tile of its own
constexpr long WIDE = 8;   // groups of weights that lie ready as tiles, or are multiplied
constexpr long AHEAD = 4;  // how many are made in advance: a tile is not loaded before it has reached the cache

// The three parts of so few rows fit one tile.
constexpr bool together(int rows) { return rows * PARTS <= EDGE; }
// Pairs that all panels of a part go through before the next, so that the inputs of R tiles of M rows stay in the L1 cache.
constexpr long block(int M, int R) { return together(M) ? 1L << 30 : R == 1 ? 4 : 2; }

static_assert(2 * 2 * block(EDGE, 2) <= WIDE, "a strip's tiles, for all rows, and the next strip's");

// A block's pairs of EDGE outputs for one of R tiles of rows; then of the next tile, the next outputs, the next block.
template <Format F, int M, int R>
class Visit {
  public:
    Visit(const Matrix& m, const Part& part)
        : first_strip_(m.panel(part.panel)), strip_bytes_(m.strip_bytes()), zeros_at_(m.zeros_at(0)),
          all_pairs_(m.pairs_of_groups()), strips_(2 * part.panels) {}
    long first = 0, strip = 0, tile = 0;  // first: pair

    bool there() const { return first < all_pairs_; }
    long pairs() const { return std::min(block(M, R), all_pairs_ - first); }
    void next() {
        if (++tile == R) tile = 0, ++strip;
        if (strip == strips_) strip = 0, first += block(M, R);
    }
    const unsigned char* weights() const { return first_strip_ + strip * strip_bytes_ + 2 * first * Matrix::unit_bytes(F); }
    const unsigned char* zeros() const { return first_strip_ + strip * strip_bytes_ + zeros_at_ + 2 * first * EDGE; }

  private:
    const unsigned char* first_strip_;
    const long strip_bytes_, zeros_at_, all_pairs_, strips_;
};

// A group's weights as a tile, rows of two neighbouring inputs of EDGE outputs, made a quarter at a time. zeros: those of p4.
template <Format F>
class Widen;
template <>
class Widen<Format::p4> {
  public:
    Widen(const unsigned char* group, const unsigned char* zeros, unsigned char* to)
        : from_(group + 4 * EDGE), to_(to),
          zero_(_mm512_shuffle_epi8(
              _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros))),
              _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)))) {}
    [[gnu::always_inline]] void quarter(long part) const {
        alignas(64) static constexpr std::uint16_t NUMBERS[32] = {
            // -16 .. 15 in bfloat16
            0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
        const vi numbers = i_load(reinterpret_cast<const unsigned char*>(NUMBERS)), low = _mm512_set1_epi8(15);
        const vi four = i_load(from_ + 64 * part);
        // The table is asked with the lowest five bits of 16.
        const vi even = _mm512_add_epi8(_mm512_and_si512(four, low), zero_);
        const vi odd = _mm512_add_epi8(_mm512_and_si512(_mm512_srli_epi16(four, 4), low), zero_);
        unsigned char* to = to_ + 4 * 64 * part;
        i_store(to, _mm512_permutexvar_epi16(even, numbers));
        i_store(to + 64, _mm512_permutexvar_epi16(odd, numbers));
        i_store(to + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(even, 8), numbers));
        i_store(to + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(odd, 8), numbers));
    }

  private:
    const unsigned char* from_;
    unsigned char* to_;
    vi zero_;
};
template <>
class Widen<Format::p8> {
  public:
    Widen(const unsigned char* group, const unsigned char*, unsigned char* to) : from_(group + 2 * EDGE), to_(to) {}
    [[gnu::always_inline]] void quarter(long part) const {
        auto floats = [&](long at) {
            return i_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from_ + at))));
        };
#pragma GCC unroll 4
        for (long i = part * 4; i < part * 4 + 4; ++i) {
            const __m512bh row = _mm512_cvtne2ps_pbh(floats(32 * i + 16), floats(32 * i));
            std::memcpy(to_ + 64 * i, &row, 64);
        }
    }

  private:
    const unsigned char* from_;
    unsigned char* to_;
};
template <>
class Widen<Format::p16> {
  public:
    Widen(const unsigned char* group, const unsigned char*, unsigned char* to) : from_(group), to_(to) {}
    [[gnu::always_inline]] void quarter(long part) const {
        std::memcpy(to_ + part * TILE_BYTES / 4, from_ + part * TILE_BYTES / 4, TILE_BYTES / 4);
    }

  private:
    const unsigned char* from_;
    unsigned char* to_;
};

// Products of 32 inputs of all rows: of each part for itself, or added up, the smallest numbers first. Both make the same
// sums: a tile's instruction adds to what is there once, at its end.
#define EACH_PART(SUM, WEIGHTS, FROM, X) \
    _tile_zero(SUM);                     \
    _tile_loadd(WEIGHTS, FROM, 64);      \
    _tile_loadd(4, X, 64);               \
    _tile_dpbf16ps(SUM, 4, WEIGHTS)
#define ALL_PARTS(SUM, WEIGHTS, FROM, X) \
    _tile_zero(SUM);                     \
    _tile_loadd(WEIGHTS, FROM, 64);      \
    _tile_loadd(4, X, PARTS * 64);       \
    _tile_dpbf16ps(SUM, 4, WEIGHTS);     \
    meanwhile(0), meanwhile(1);          \
    _tile_loadd(5, X + 64, PARTS * 64);  \
    _tile_dpbf16ps(SUM, 5, WEIGHTS);     \
    meanwhile(2), meanwhile(3);          \
    _tile_loadd(4, X + 128, PARTS * 64); \
    _tile_dpbf16ps(SUM, 4, WEIGHTS)

// What runs ahead of the sums that are merged: weights become tiles, tiles are multiplied, sums go to memory.
template <Format F, int M, int R>
class Front {
  public:
    Front(const Product& p, const Part& part, long row, const char* ahead)
        : x_(p.low->parts), row_(row), coming_(ahead), widened_(p.m, part), now_(p.m, part) {
        for (long i = 0; i < AHEAD; ++i) {
            if (!next_to_widen()) continue;
            const Widen<F> tile(from_, zeros_, wide_[made_ % WIDE]);
            for (long part = 0; part < 4; ++part) tile.quarter(part);
            widened();
        }
        turn();
    }
    // Of every four units one for each SLOT. After it the sums of the unit four before are in memory.
    template <int SLOT>
    [[gnu::always_inline]] void go() {
        const bool one = next_to_widen();
        const Widen<F> tile(from_, one ? zeros_ : wide_[0], wide_[made_ % WIDE]);
        // Between the tiles' instructions, where there are several: a processor that works for two threads at a time does not look
        // far enough ahead to find it behind them.
        constexpr bool between = !together(M);
        for (long part = 0; !(between && left_) && one && part < 4; ++part) tile.quarter(part);
        auto meanwhile = [&](long part) __attribute__((always_inline)) {
            if (one) tile.quarter(part);
        };
        fetch<(SLOT + 1) % SLOTS>();
        settle(this);
        if (left_) {
            const unsigned char *w = wide_[tile_ % WIDE], *x = at_;
            if constexpr (together(M)) {
                if constexpr (SLOT == 0) { EACH_PART(0, 6, w, x); }
                if constexpr (SLOT == 1) { EACH_PART(1, 7, w, x); }
                if constexpr (SLOT == 2) { EACH_PART(2, 6, w, x); }
                if constexpr (SLOT == 3) { EACH_PART(3, 7, w, x); }
            } else {
                if constexpr (SLOT == 0) { ALL_PARTS(0, 6, w, x); }
                if constexpr (SLOT == 1) { ALL_PARTS(1, 7, w, x); }
                if constexpr (SLOT == 2) { ALL_PARTS(2, 6, w, x); }
                if constexpr (SLOT == 3) { ALL_PARTS(3, 7, w, x); }
            }
            ++tile_, at_ += PARTS * TILE_BYTES;
            if (!--left_) now_.next(), turn();
        }
        if (one) widened();
    }
    // [EDGE][EDGE]
    template <int SLOT>
    const float (&sums() const)[EDGE][EDGE] {
        return sums_[SLOT];
    }

  private:
    template <int SLOT>
    void fetch() {
        if constexpr (SLOT == 0) _tile_stored(0, sums_[0], 64);
        if constexpr (SLOT == 1) _tile_stored(1, sums_[1], 64);
        if constexpr (SLOT == 2) _tile_stored(2, sums_[2], 64);
        if constexpr (SLOT == 3) _tile_stored(3, sums_[3], 64);
    }
    void turn() {
        if (!now_.there()) return;
        left_ = 2 * now_.pairs(), at_ = x_.parts(row_ + now_.tile * EDGE, 2 * now_.first);
        if (now_.tile) tile_ -= left_;  // the same weights again
    }
    // Whether there is a tile to be made now.
    [[gnu::always_inline]] bool next_to_widen() {
        if (!widening_) {
            if (!widened_.there()) return false;
            widening_ = 2 * widened_.pairs(), from_ = widened_.weights(), zeros_ = widened_.zeros();
        }
        // With several tiles of rows there is as much time for it as they take.
        if (R > 1 && skip_) return --skip_, false;
        if (coming_) {
#pragma GCC unroll 16
            for (long j = 0; j < SOON; j += 64) prefetch(coming_ + j);
            coming_ += SOON;
        }
        return true;
    }
    [[gnu::always_inline]] void widened() {
        from_ += BYTES, zeros_ += EDGE, ++made_;
        if (--widening_) return;
        skip_ = (R - 1) * 2 * widened_.pairs();
        for (int i = 0; i < R; ++i) widened_.next();
    }

    static constexpr long BYTES = Matrix::unit_bytes(F), SOON = (BYTES + EDGE + 63) / 64 * 64;  // with zeros
    const RowsOfParts& x_;
    const long row_;
    const char* coming_;
    Visit<F, M, R> widened_, now_;
    const unsigned char *from_ = nullptr, *zeros_ = nullptr, *at_ = nullptr;
    long widening_ = 0, skip_ = 0, left_ = 0;
    unsigned long made_ = 0, tile_ = 0;
    alignas(64) float sums_[SLOTS][EDGE][EDGE];
    alignas(64) unsigned char wide_[WIDE][TILE_BYTES];
};
#undef EACH_PART
#undef ALL_PARTS

// acc = fma(sums, scale, acc) for a group of weights, and so on: as above.
template <Format F, int M>
[[gnu::always_inline]] inline void merge(const float (&sums)[EDGE][EDGE], const unsigned char* group, const float* totals, vf (&acc)[M]) {
    const std::uint16_t* about = reinterpret_cast<const std::uint16_t*>(group);
    const vf scale = F == Format::p16 ? v_zero() : h_load(about);
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) {
        const vf sum = together(M) ? v_load(sums[PARTS * r]) + v_load(sums[PARTS * r + 1]) + v_load(sums[PARTS * r + 2])
                                   : v_load(sums[r]);
        acc[r] = F == Format::p16 ? acc[r] + sum : v_fma(sum, scale, acc[r]);
    }
    if (F != Format::p4) return;
    const vf rest = h_load(about + EDGE);
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) acc[r] = v_fma(v_set(totals[r]), rest, acc[r]);
}

// R tiles of M rows, some of which may not be there, of all panels of the part. `ahead`: what is read next, or null.
template <Format F, int M, int R>
void multiply(const Product& p, const Part& part, long row, const char* ahead, float* sums) {
    Front<F, M, R> front(p, part, row, ahead);
    front.template go<0>(), front.template go<1>(), front.template go<2>(), front.template go<3>();
    bool even = true;
    constexpr long bytes = Matrix::unit_bytes(F);
    for (Visit<F, M, R> v(p.m, part); v.there(); v.next()) {
        float* kept = sums + (v.strip * R + v.tile) * EDGE * EDGE;
        vf acc[M];
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) acc[r] = v.first ? v_load(kept + r * EDGE) : v_zero();
        const unsigned char* group = v.weights();
        const float* totals = p.low->parts.totals(row + v.tile * EDGE, 2 * v.first);
        for (long left = v.pairs(); left; --left, even = !even, group += 2 * bytes, totals += 2 * EDGE) {
            if (even) {
                front.template go<0>();
                merge<F>(front.template sums<0>(), group, totals, acc);
                front.template go<1>();
                merge<F>(front.template sums<1>(), group + bytes, totals + EDGE, acc);
            } else {
                front.template go<2>();
                merge<F>(front.template sums<2>(), group, totals, acc);
                front.template go<3>();
                merge<F>(front.template sums<3>(), group + bytes, totals + EDGE, acc);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) v_store(kept + r * EDGE, acc[r]);
    }
    const long rows = std::min<long>(part.row + part.rows - row, (R - 1) * EDGE + M);
    for (long panel = 0; panel < part.panels; ++panel, sums += 2 * R * EDGE * EDGE) {
        auto some = [&]<int N>(std::integral_constant<int, N>, long r) {
            vf all[N][2];
            for (int i = 0; i < N; ++i)
                all[i][0] = v_load(sums + (r + i) * EDGE), all[i][1] = v_load(sums + (R * EDGE + r + i) * EDGE);
            store<N>(p, part.panel + panel, row + r, all);
        };
        long r = 0;
        for (; r + 4 <= rows; r += 4) some(std::integral_constant<int, 4>{}, r);
        for (; r < rows; ++r) some(std::integral_constant<int, 1>{}, r);
    }
}

using Multiply = void (*)(const Product&, const Part&, long, const char*, float*);
template <Format F, int... I>
constexpr Multiply pick(long rows, std::integer_sequence<int, I...>) {
    constexpr Multiply some[] = {multiply<F, I + 1, 1>...};
    return rows > EDGE ? multiply<F, EDGE, 2> : some[rows - 1];
}

}  // namespace

void linear_parts(const Product& p, const Part& part, Buffers& mem, const char* ahead) {
    constexpr auto sizes = std::make_integer_sequence<int, EDGE>();
    grow(mem.panel, part.panels * 2 * 2 * EDGE * EDGE);
    for (long row = part.row, stop = row + part.rows; row < stop; row += 2 * EDGE, ahead = nullptr) {
        const long rows = std::min(2 * EDGE, stop - row);
        const auto f = p.m.format == Format::p16  ? pick<Format::p16>(rows, sizes)
                       : p.m.format == Format::p8 ? pick<Format::p8>(rows, sizes)
                                                  : pick<Format::p4>(rows, sizes);
        if (rows < EDGE) shape_tiles(together(rows) ? rows * PARTS : rows);
        f(p, part, row, ahead, mem.panel.data());
        if (rows < EDGE) shape_tiles(EDGE);
    }
}

void RowsOfParts::set(long row, const float* x) {
    for (long g = 0; g < groups; ++g, x += GROUP) {
        const bool there = g < given_;  // the last may be there only to make a pair
        vf rest[2] = {there ? v_load(x) : v_zero(), there ? v_load(x + VL) : v_zero()};
        totals_[(row / EDGE * groups + g) * EDGE + row % EDGE] = v_sum(rest[0] + rest[1]);
        for (long part = PARTS - 1; part >= 0; --part) {
            unsigned char* to = parts_.data() + (((row / EDGE * groups + g) * EDGE + row % EDGE) * PARTS + part) * 64;
            for (int half = 0; half < 2; ++half) {
                const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(rest[half]);
                _mm256_store_si256(reinterpret_cast<__m256i*>(to + 32 * half), rounded);
                rest[half] = rest[half] - b_load(reinterpret_cast<const std::uint16_t*>(to + 32 * half));
            }
        }
    }
}

#else

void linear_parts(const Product&, const Part&, Buffers&, const char*) {}
void RowsOfParts::set(long, const float*) {}

#endif

void RowsOfParts::shape(long rows, long k) {
    given_ = k / GROUP, groups = round_up(given_, 2), rows = round_up(rows, EDGE);
    grow(parts_, rows * groups * PARTS * 64), grow(totals_, rows * groups);
}
