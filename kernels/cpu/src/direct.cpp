// Products of one tile of rows: weights go from memory to registers and are used there, which costs less than to write them
// in float32 and read them again. One row is few independent sums, and additions that wait for each other leave the
// multipliers idle: then several panels are done side by side.
#include <algorithm>

#include "linear.h"
#include "reader.h"
#include "store.h"

namespace {

// Panels side by side for `rows` rows: about as many sums as registers hold.
constexpr long side_by_side(long rows) { return rows == 1 ? 3 : rows == 2 ? 2 : 1; }

// V: vectors of a panel at a time. Both, where there are registers for so many sums; otherwise one after the other.
template <Format F, int M, int P, int V>
void block(const Product& p, long panel, long row, Coming coming) {
    const Matrix& m = p.m;
    const float* x[(M + 2) / 3];  // of every third row: the others are one or two strides away, which addressing modes do
    for (int i = 0; i < (M + 2) / 3; ++i) x[i] = p.x + (row + 3 * i) * p.ldx;
    const long stride = m.panel_bytes(), step = m.group_bytes();
    vf all[P][M][2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half += V) {
        const unsigned char* at = m.panel(panel);
        vf acc[P][M][V];
        for (int i = 0; i < P; ++i)
            for (int r = 0; r < M; ++r)
                for (int j = 0; j < V; ++j) acc[i][r][j] = v_zero();
        for (long first = 0; first < m.k; first += GROUP, at += step) {
            Reader<F> from[P];
            for (int i = 0; i < P; ++i) from[i].group(at + i * stride);
            auto add = [&](long kk, int j) __attribute__((always_inline)) {
                vf w[P][V];
#pragma GCC unroll 8
                for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
                    for (int v = 0; v < V; ++v) w[i][v] = from[i].get(j, half + v);
#pragma GCC unroll 16
                for (int r = 0; r < M; ++r) {
                    const vf input = v_set(x[r / 3][r % 3 * p.ldx + first + kk]);
#pragma GCC unroll 8
                    for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
                        for (int v = 0; v < V; ++v) acc[i][r][v] = v_fma(input, w[i][v], acc[i][r][v]);
                }
            };
            const long count = std::min(GROUP, m.k - first);
            for (long i4 = 0; i4 < count / 4; ++i4) {
                if (V == 2 || i4 % 2 == half) coming();
                for (int i = 0; i < P; ++i) from[i].four(i4);
                add(4 * i4, 0), add(4 * i4 + 1, 1), add(4 * i4 + 2, 2), add(4 * i4 + 3, 3);
            }
            if (count % 4) {
                for (int i = 0; i < P; ++i) from[i].four(count / 4);
                for (int j = 0; j < count % 4; ++j) add(count / 4 * 4 + j, j);
            }
        }
        for (int i = 0; i < P; ++i)
            for (int r = 0; r < M; ++r)
                for (int v = 0; v < V; ++v) all[i][r][half + v] = acc[i][r][v];
    }
    for (int i = 0; i < P; ++i) store<M>(p, panel + i, row, all[i]);
}

using Block = void (*)(const Product&, long, long, Coming);
template <Format F, int... I>
constexpr Block pick_halves(long rows, std::integer_sequence<int, I...>) {
    constexpr Block some[] = {block<F, MR + 1 + I, 1, 1>...};
    return some[rows - MR - 1];
}
template <Format F, int... I>
constexpr Block pick(long rows, bool wide, std::integer_sequence<int, I...>) {
    constexpr Block one[] = {block<F, I + 1, 1, 2>...}, several[] = {block<F, I + 1, side_by_side(I + 1), 2>...};
    return (wide ? several : one)[rows - 1];
}

template <Format F>
void run(const Product& p, const Part& part, const char* ahead) {
    const long unit = direct_panels(part.rows), end = part.panel + part.panels, fours = (p.m.k + 3) / 4;
    for (long panel = part.panel, next; panel < end; panel = next) {
        const bool wide = panel + unit <= end;
        next = panel + (wide ? unit : 1);
        const char* soon = next < end ? reinterpret_cast<const char*>(p.m.panel(next)) : ahead;
        const long step = ((next - panel) * p.m.panel_bytes() + fours - 1) / fours;
        const auto f = part.rows > MR ? pick_halves<F>(part.rows, std::make_integer_sequence<int, DIRECT_ROWS - MR>())
                                      : pick<F>(part.rows, wide, std::make_integer_sequence<int, MR>());
        f(p, panel, part.row, {soon, step});
    }
}

}  // namespace

long direct_panels(long rows) { return side_by_side(rows); }

void linear_direct(const Product& p, const Part& part, const char* ahead) {
    switch (p.m.format) {
        case Format::f32: return run<Format::f32>(p, part, ahead);
        case Format::f16: return run<Format::f16>(p, part, ahead);
        case Format::bf16: return run<Format::bf16>(p, part, ahead);
        case Format::q8: return run<Format::q8>(p, part, ahead);
        case Format::q4: return run<Format::q4>(p, part, ahead);
        default: return;  // by tiles
    }
}
