#include "linear.h"

#include <algorithm>

#include "store.h"
#include "tile.h"

namespace {

// Bytes of x that a thread goes through for each panel: they should stay in its L2 cache, beside two panels.
constexpr long X_BYTES = 768 << 10;
constexpr long STRETCH = 2 * GROUP;  // inputs whose weights a lone tile unpacks at a time: they stay in the L1 cache

// Asks for memory that is read next, a little at each call.
struct Coming {
    const char* at;
    long step;
    void operator()() {
        prefetch(at);
        if (step > 64) prefetch(at + 64);
        at += step;
    }
};

// `floats`: the panel in float32, or null: it is unpacked on the way into `buffer`.
template <int M>
void block(const Product& p, long panel, long row, const float* floats, float* buffer, Coming coming) {
    const Matrix& m = p.m;
    const float* x = p.x + row * p.ldx;
    vf acc[M][2];
    if (floats) {
        tile<M, 2>(x, p.ldx, [=](long kk) { return floats + kk * NR; }, m.k, acc, coming);
    } else {
        for (int i = 0; i < M; ++i) acc[i][0] = acc[i][1] = v_zero();
        for (long first = 0; first < m.k; first += STRETCH) {
            const long count = std::min(STRETCH, m.k - first);
            m.unpack(panel, first, count, buffer);
            tile_on<M, 2>(x + first, p.ldx, [=](long kk) { return buffer + kk * NR; }, count, acc, coming);
        }
    }
    store<M>(p, panel, row, acc);
}

using Block = void (*)(const Product&, long, long, const float*, float*, Coming);
template <int... I>
constexpr Block pick(int m, std::integer_sequence<int, I...>) {
    constexpr Block table[] = {block<I + 1>...};
    return table[m - 1];
}

// Rows [first, first + count) of one panel.
void linear32(const Product& p, long panel, long first, long count, Buffers& mem, const char* ahead) {
    const Matrix& m = p.m;
    const long tiles = (count + MR - 1) / MR, step = (m.panel_bytes() / tiles + m.k - 1) / m.k;
    const float* floats = nullptr;
    if (m.format == Format::f32) {
        floats = reinterpret_cast<const float*>(m.panel(panel));
    } else {
        mem.panel.resize(std::max<size_t>(mem.panel.size(), (m.k + GROUP) * NR));
        if (tiles > 1) {
            m.unpack(panel, 0, m.k, mem.panel.data());
            floats = mem.panel.data();
        }
    }
    long row = first;
    for (long t = 0; t < tiles; ++t) {
        int size = static_cast<int>((first + count - row + tiles - t - 1) / (tiles - t));  // as even as can be
        pick(size, std::make_integer_sequence<int, MR>())(p, panel, row, floats, mem.panel.data(), {ahead, step});
        ahead += m.k * step;
        row += size;
    }
}

}  // namespace

void linear(Worker& w, const Product& p, std::vector<Buffers>& buffers, const Matrix* next,
            const std::function<void()>& last) {
    const Matrix& m = p.m;
    const long panels = m.count();
    const long band = std::max<long>(BAND, X_BYTES / (m.k * (m.whole ? 1 : 4)) / BAND * BAND);
    const long bands = (p.rows + band - 1) / band;
    w.each(bands * panels, [&](long task) {
        const long panel = task % panels, first = task / panels * band, count = std::min(band, p.rows - first);
        // While this panel is used, the one that this thread probably takes next comes into the cache.
        const long coming = panel + w.pool.size();
        const unsigned char* target =
            coming < panels ? m.panel(coming) : next ? next->panel((coming - panels) % next->count()) : m.panels;
        const char* ahead = reinterpret_cast<const char*>(target);
        if (m.whole)
            linear8(p, panel, first, count, ahead);
        else
            linear32(p, panel, first, count, buffers[w.rank], ahead);
    }, last);
}
