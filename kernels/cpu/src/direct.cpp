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

template <Format F, int M, int P>
void block(const Product& p, long panel, long row, Coming coming) {
    const Matrix& m = p.m;
    const float* x[(M + 2) / 3];  // of every third row: the others are one or two strides away, which addressing modes do
    for (int i = 0; i < (M + 2) / 3; ++i) x[i] = p.x + (row + 3 * i) * p.ldx;
    const long stride = m.panel_bytes(), step = m.group_bytes();
    const unsigned char* at = m.panel(panel);
    vf acc[P][M][2];
    for (int i = 0; i < P; ++i)
        for (int r = 0; r < M; ++r) acc[i][r][0] = acc[i][r][1] = v_zero();
    for (long first = 0; first < m.k; first += GROUP, at += step) {
        Reader<F> from[P];
        for (int i = 0; i < P; ++i) from[i].group(at + i * stride);
        auto add = [&](long kk, int j) __attribute__((always_inline)) {
            vf w[P][2];
#pragma GCC unroll 8
            for (int i = 0; i < P; ++i) w[i][0] = from[i].get(j, 0), w[i][1] = from[i].get(j, 1);
#pragma GCC unroll 16
            for (int r = 0; r < M; ++r) {
                const vf v = v_set(x[r / 3][r % 3 * p.ldx + first + kk]);
#pragma GCC unroll 8
                for (int i = 0; i < P; ++i)
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half) acc[i][r][half] = v_fma(v, w[i][half], acc[i][r][half]);
            }
        };
        const long count = std::min(GROUP, m.k - first);
        for (long i4 = 0; i4 < count / 4; ++i4) {
            coming();
            for (int i = 0; i < P; ++i) from[i].four(i4);
            add(4 * i4, 0), add(4 * i4 + 1, 1), add(4 * i4 + 2, 2), add(4 * i4 + 3, 3);
        }
        if (count % 4) {
            for (int i = 0; i < P; ++i) from[i].four(count / 4);
            for (int j = 0; j < count % 4; ++j) add(count / 4 * 4 + j, j);
        }
    }
    for (int i = 0; i < P; ++i) store<M>(p, panel + i, row, acc[i]);
}

// More rows than have sums in registers for both vectors of a panel: one after the other.
template <Format F, int M>
void halves(const Product& p, long panel, long row, Coming coming) {
    const Matrix& m = p.m;
    const float* x[(M + 2) / 3];
    for (int i = 0; i < (M + 2) / 3; ++i) x[i] = p.x + (row + 3 * i) * p.ldx;
    vf all[M][2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const unsigned char* at = m.panel(panel);
        vf acc[M];
        for (int r = 0; r < M; ++r) acc[r] = v_zero();
        for (long first = 0; first < m.k; first += GROUP, at += m.group_bytes()) {
            Reader<F> from;
            from.group(at);
            const long count = std::min(GROUP, m.k - first);
            for (long i4 = 0; i4 < (count + 3) / 4; ++i4) {
                if (i4 % 2 == half) coming();
                from.four(i4);
                auto add = [&](int j) __attribute__((always_inline)) {
                    const vf w = from.get(j, half);
#pragma GCC unroll 16
                    for (int r = 0; r < M; ++r)
                        acc[r] = v_fma(v_set(x[r / 3][r % 3 * p.ldx + first + 4 * i4 + j]), w, acc[r]);
                };
                if (4 * i4 + 4 <= count)
                    add(0), add(1), add(2), add(3);
                else
                    for (int j = 0; j < count % 4; ++j) add(j);
            }
        }
        for (int r = 0; r < M; ++r) all[r][half] = acc[r];
    }
    store<M>(p, panel, row, all);
}

using Block = void (*)(const Product&, long, long, Coming);
template <Format F, int... I>
constexpr Block pick_halves(long rows, std::integer_sequence<int, I...>) {
    constexpr Block some[] = {halves<F, MR + 1 + I>...};
    return some[rows - MR - 1];
}
template <Format F, int... I>
constexpr Block pick(long rows, bool wide, std::integer_sequence<int, I...>) {
    constexpr Block one[] = {block<F, I + 1, 1>...}, several[] = {block<F, I + 1, side_by_side(I + 1)>...};
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
