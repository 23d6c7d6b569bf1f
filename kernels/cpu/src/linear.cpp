#include "linear.h"

#include <algorithm>

namespace {

// Bytes of x that a thread goes through for each panel: they should stay in its L2 cache, beside two panels.
constexpr long X_BYTES = 768 << 10;

vf silu(vf x) { return x / (v_set(1.0f) + v_exp(v_zero() - x)); }

struct Job {
    const Matrix& m;
    const float* x;
    long ldx;
    float* y;
    long ldy;
    Then then;
};

template <int M>
void block(const Job& job, long panel, long row, const char* ahead, long stride) {
    const Matrix& m = job.m;
    vf acc[M][2];
    const float* weights = m.panel(panel);
    tile<M, 2>(
        job.x + row * job.ldx, job.ldx, [=](long kk) { return weights + kk * NR; }, m.k, acc,
        [&] {
            prefetch(ahead), prefetch(ahead + 64);
            ahead += stride;
        });
    if (m.bias) {
        vf b0 = v_load(m.bias + panel * NR), b1 = v_load(m.bias + panel * NR + VL);
        for (int i = 0; i < M; ++i) acc[i][0] = acc[i][0] + b0, acc[i][1] = acc[i][1] + b1;
    }
    const long width = m.pairs ? VL : NR, first = panel * width, n = std::min(width, m.n - first);
    for (int i = 0; i < M; ++i) {
        float* out = job.y + (row + i) * job.ldy + first;
        if (job.then == Then::swiglu) {
            v_store_n(out, silu(acc[i][0]) * acc[i][1], n);
            continue;
        }
        int n0 = std::min<long>(n, VL), n1 = n - n0;
        if (job.then == Then::add) {
            acc[i][0] = v_load_n(out, n0) + acc[i][0];
            if (n1) acc[i][1] = v_load_n(out + VL, n1) + acc[i][1];
        }
        v_store_n(out, acc[i][0], n0);
        if (n1) v_store_n(out + VL, acc[i][1], n1);
    }
}

using Block = void (*)(const Job&, long, long, const char*, long);
template <int... I>
constexpr Block pick(int m, std::integer_sequence<int, I...>) {
    constexpr Block table[] = {block<I + 1>...};
    return table[m - 1];
}

}  // namespace

void linear(Worker& w, const Matrix& m, const float* x, long ldx, long rows, float* y, long ldy, Then then,
            const Matrix* next, const std::function<void()>& last) {
    const Job job{m, x, ldx, y, ldy, then};
    const long panels = m.count();
    const long band = std::max<long>(MR, X_BYTES / (m.k * 4) / MR * MR);
    const long bands = (rows + band - 1) / band;
    w.each(bands * panels, [&](long task) {
        const long panel = task % panels, first = task / panels * band, count = std::min(band, rows - first);
        // While this panel is used, the one that this thread probably takes next comes into the cache.
        const long coming = panel + w.pool.size();
        const float* target = coming < panels ? m.panel(coming) : next ? next->panel((coming - panels) % next->count()) : m.panels;
        const char* ahead = reinterpret_cast<const char*>(target);
        const long tiles = (count + MR - 1) / MR;
        const long stride = NR * 4 / tiles;
        long row = first;
        for (long t = 0; t < tiles; ++t) {
            int size = static_cast<int>((first + count - row + tiles - t - 1) / (tiles - t));  // as even as can be
            pick(size, std::make_integer_sequence<int, MR>())(job, panel, row, ahead + t * m.k * stride, stride);
            row += size;
        }
    }, last);
}

void Matrix::pack(const float* weight, const float* given_bias, Pool& pool, Arena& arena) {
    panels = arena.take(count() * k * NR);
    const long width = pairs ? VL : NR;
    // The weight row of lane `lane` of panel `p`, or -1.
    auto source = [&](long p, long lane) {
        long out = p * width + lane % width;
        return out >= n ? -1 : out + (pairs && lane >= VL ? n : 0);
    };
    pool.run(1, [&](Worker& w) {
        w.each(count(), [&](long p) {
            float* to = panels + p * k * NR;
            for (long half = 0; half < NR; half += VL) {
                const float* rows[VL];
                bool whole = true;
                for (long j = 0; j < VL; ++j) {
                    long row = source(p, half + j);
                    whole = whole && row >= 0;
                    rows[j] = row >= 0 ? weight + row * k : nullptr;
                }
                if (whole) {
                    transpose(rows, k, to + half, NR);
                    continue;
                }
                for (long kk = 0; kk < k; ++kk)
                    for (long j = 0; j < VL; ++j) to[kk * NR + half + j] = rows[j] ? rows[j][kk] : 0.0f;
            }
        });
    });
    if (!given_bias) return;
    bias = arena.take(count() * NR);
    for (long p = 0; p < count(); ++p)
        for (long lane = 0; lane < NR; ++lane) {
            long row = source(p, lane);
            bias[p * NR + lane] = row >= 0 ? given_bias[row] : 0.0f;
        }
}

void Matrix::row(long row, float* out) const {
    const float* from = panel(row / NR) + row % NR;
    for (long kk = 0; kk < k; ++kk) out[kk] = from[kk * NR];
}
