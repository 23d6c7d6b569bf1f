#include "linear.h"

#include <algorithm>

#include "store.h"
#include "tile.h"

namespace {

// Bytes of x that a thread goes through for each panel: they should stay in its L2 cache, beside two panels.
constexpr long X_BYTES = 768 << 10;
// A task is about so many panels times rows, so that taking it costs little beside doing it.
constexpr long TASK = 24;
constexpr long WHOLE_FASTER = 3;  // than float32
constexpr long TILE_PANELS = 4;   // however many rows

// `floats`: the panel.
template <int M>
void block(const Product& p, long panel, long row, const float* floats, Coming coming) {
    vf acc[M][2];
    tile<M, 2>(p.x + row * p.ldx, p.ldx, [=](long kk) { return floats + kk * NR; }, p.m.k, acc, coming);
    store<M>(p, panel, row, acc);
}

using Block = void (*)(const Product&, long, long, const float*, Coming);
template <int... I>
constexpr Block pick(int m, std::integer_sequence<int, I...>) {
    constexpr Block table[] = {block<I + 1>...};
    return table[m - 1];
}

// Many rows, one panel: it is float32 first.
void linear_unpacked(const Product& p, const Part& part, Buffers& mem, const char* ahead) {
    const Matrix& m = p.m;
    const long tiles = (part.rows + MR - 1) / MR, step = (m.panel_bytes() / tiles + m.k - 1) / m.k;
    const float* floats = reinterpret_cast<const float*>(m.panel(part.panel));
    if (m.format != Format::f32) {
        grow(mem.panel, (m.k + GROUP) * NR);
        m.unpack(part.panel, 0, m.k, mem.panel.data());
        floats = mem.panel.data();
    }
    long row = part.row;
    for (long t = 0; t < tiles; ++t) {
        int size = static_cast<int>((part.row + part.rows - row + tiles - t - 1) / (tiles - t));  // as even as can be
        pick(size, std::make_integer_sequence<int, MR>())(p, part.panel, row, floats, {ahead, step});
        ahead += m.k * step;
        row += size;
    }
}

// A task is some neighbouring panels: as many as let each thread have some, but no more than are a moment's work.
long panels_of_task(const Matrix& m, long rows, long threads) {
    const bool low = m.by != Products::floats, direct = !low && rows <= DIRECT_ROWS;
    const long unit = direct ? direct_panels(rows) : 1, most = TASK * (low ? WHOLE_FASTER : 1) / (unit * rows);
    const long least = by_tiles(m.by) ? TILE_PANELS : 1;
    return direct || low ? unit * std::clamp(m.count() / (unit * threads * 4), 1L, std::max(least, most)) : 1;
}

}  // namespace

void linear(Worker& w, const Product& p, std::vector<Buffers>& buffers, const Matrix* next,
            const std::function<void()>& last) {
    const Matrix& m = p.m;
    const long panels = m.count(), threads = w.pool.size();
    const long size_of_x = m.by == Products::floats ? 4 : m.by == Products::parts ? 2 * PARTS : m.by == Products::tiles ? 2 : 1;
    const long band = std::max<long>(BAND, X_BYTES / (m.k * size_of_x) / BAND * BAND);
    const long bands = (p.rows + band - 1) / band;
    const long rows = std::max(1L, p.rows);  // a step of chunks alone samples none: no bands, so no tasks
    const bool direct = m.by == Products::floats && rows <= DIRECT_ROWS;
    const long size = panels_of_task(m, rows, threads), tasks = (panels + size - 1) / size;
    const long next_size = next ? panels_of_task(*next, rows, threads) : 1;
    const long next_tasks = next ? (next->count() + next_size - 1) / next_size : 0;
    w.each(bands * tasks, [&](long task) {
        const long at = task % tasks * size, row = task / tasks * band;
        const Part part{at, std::min(size, panels - at), row, std::min(band, p.rows - row)};
        // While these are used, those that this thread probably takes next come into the cache: the following ones, or those where
        // its stretch of the next matrix begins.
        const bool more = !next || task + 1 < w.stretch(bands * tasks, w.rank + 1);
        const long soon = more ? (task + 1) % tasks * size : w.stretch(next_tasks, w.rank) * next_size;
        const unsigned char* target = (more ? m : *next).panel(soon);
        const char* ahead = reinterpret_cast<const char*>(target);
        if (m.by == Products::whole)
            linear8(p, part, ahead);
        else if (m.by == Products::tiles)
            linear_tiles(p, part, buffers[w.rank], ahead);
        else if (m.by == Products::parts)
            linear_parts(p, part, buffers[w.rank], ahead);
        else if (direct)
            linear_direct(p, part, ahead);
        else
            linear_unpacked(p, part, buffers[w.rank], ahead);
    }, last);
}
