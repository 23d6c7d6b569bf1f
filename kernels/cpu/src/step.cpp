#include "step.h"

#include <algorithm>

#include "rows.h"

namespace {
constexpr int PHASES = 12;    // of one layer, at most
constexpr long ALONE = 5000;  // floats that one thread goes through faster than several agree on it
}

void Model::reserve(long tokens) {
    grow(hidden_, tokens * shape.hidden), grow(normed_, tokens * shape.hidden);
    grow(attended_, tokens * shape.heads * shape.dim), grow(inner_, tokens * shape.intermediate);
    grow(qkv_, tokens * (shape.heads + 2 * shape.kv_heads) * shape.dim);
    buffers_.resize(pool.size());
    for (const Layer& l : layers) {
        low_normed_.shape(l.qkv.by, tokens, shape.hidden), low_normed_.shape(l.gate_up.by, tokens, shape.hidden);
        low_attended_.shape(l.o.by, tokens, shape.heads * shape.dim), low_inner_.shape(l.down.by, tokens, shape.intermediate);
    }
    low_normed_.shape(head.by, tokens, shape.hidden);
}

void Model::forward(const Step& step) {
    const Sequences& s = step.sequences;
    long highest = 0;  // of the blocks that are in use; what the step writes is among them
    for (long i = 0; i < s.table_starts[s.count]; ++i) highest = std::max(highest, s.tables[i]);
    const auto block = [&](long id) { return step.pages.at(id, 0, 0, 0); };
    const Populate::Step begun(populate_, block(0), block(step.blocks), block(highest + 1));

    reserve(s.tokens);
    plan_.build(s, step.pages, shape.heads, pool.size());
    pool.run(static_cast<int>(shape.layers) * PHASES + 4, [&](Worker& w) {
        Tiles lent(tiles || plan_.tiles());
        run(w, step);
    });
}

// Norm and turn a token's q and k in place; k and v go to the pool.
void Model::place(const Layer& layer, const Step& step, long index, long token) {
    const long dim = shape.dim, heads = shape.heads, kv_heads = shape.kv_heads;
    float* row = qkv_.data() + token * (heads + 2 * kv_heads) * dim;
    const float* angles = step.angles + step.positions[token] * dim;
    for (long h = 0; h < heads + kv_heads; ++h) {
        const auto& norm = h < heads ? layer.q_norm : layer.k_norm;
        if (!norm.empty()) rms_norm(row + h * dim, norm.data(), shape.eps, dim, row + h * dim);
        rotate(row + h * dim, angles, dim, row + h * dim);
    }
    const float* key = row + heads * dim;
    step.pages.write(step.sequences.slots[token], index, key, key + kv_heads * dim);
}

void Model::run(Worker& w, const Step& step) {
    const long hidden = shape.hidden, q_width = shape.heads * shape.dim;
    const long qkv_width = (shape.heads + 2 * shape.kv_heads) * shape.dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
    long rows = step.sequences.tokens;
    // What works row by row is too little for several threads when there are few rows: the thread that finishes the
    // phase before does it on its way.
    auto alone = [&](long width) { return rows * width <= ALONE; };
    auto each_alone = [&](long width, auto&& f) {
        for (long r = 0; alone(width) && r < rows; ++r) f(r);
    };
    auto each_together = [&](long width, auto&& f) {
        if (alone(width)) return;
        const long size = std::clamp(rows / (4L * w.pool.size()), 1L, EDGE);
        w.each((rows + size - 1) / size, [&](long i) {
            for (long r = i * size; r < std::min(rows, (i + 1) * size); ++r) f(r);
        });
    };
    auto norm_for = [&](const Matrix& next, const Lines<float>& weight) {
        return [&](long r) {
            rms_norm(hidden_.data() + r * hidden, weight.data(), shape.eps, hidden, normed_.data() + r * hidden);
            low_normed_.set(next.by, r, normed_.data() + r * hidden);
        };
    };
    auto multiply = [&](const Matrix& m, const float* x, const LowRows& low, float* y, Then then, const Matrix& next,
                        auto&& last) {
        linear(w, {m, x, m.k, &low, rows, y, m.n, then}, buffers_, &next, last);
    };

    w.each(
        rows, [&](long r) { (tied ? head : embed).row(step.ids[r], hidden_.data() + r * hidden); },
        [&] { each_alone(hidden, norm_for(layers[0].qkv, layers[0].input_norm)); });
    for (long i = 0; i < shape.layers; ++i) {
        const Layer& layer = layers[i];
        const bool final = i + 1 == shape.layers;
        const Matrix& after = final ? head : layers[i + 1].qkv;
        const auto& after_norm = final ? norm : layers[i + 1].input_norm;
        auto place_row = [&](long r) { place(layer, step, i, r); };
        auto attended_row = [&](long r) { low_attended_.set(layer.o.by, r, attended_.data() + r * q_width); };
        auto inner_row = [&](long r) { low_inner_.set(layer.down.by, r, inner_.data() + r * shape.intermediate); };
        const bool low_o = layer.o.by != Products::floats, low_down = layer.down.by != Products::floats;

        each_together(hidden, norm_for(layer.qkv, layer.input_norm));
        multiply(layer.qkv, normed_.data(), low_normed_, qkv_.data(), Then::store, layer.o,
                 [&] { each_alone(hidden, place_row); });
        each_together(hidden, place_row);
        plan_.run(w, qkv_.data(), qkv_width, step.pages, i, scale, attended_.data(), [&] {
            if (final) gather(step);
            const long kept = final ? step.rows : rows;
            for (long r = 0; low_o && kept * q_width <= ALONE && r < kept; ++r) attended_row(r);
        });
        if (final) rows = step.rows;
        if (low_o) each_together(q_width, attended_row);
        multiply(layer.o, attended_.data(), low_attended_, hidden_.data(), Then::add, layer.gate_up,
                 [&] { each_alone(hidden, norm_for(layer.gate_up, layer.post_norm)); });
        each_together(hidden, norm_for(layer.gate_up, layer.post_norm));
        multiply(layer.gate_up, normed_.data(), low_normed_, inner_.data(), Then::swiglu, layer.down, [&] {
            if (low_down) each_alone(shape.intermediate, inner_row);
        });
        if (low_down) each_together(shape.intermediate, inner_row);
        multiply(layer.down, inner_.data(), low_inner_, hidden_.data(), Then::add, after,
                 [&] { each_alone(hidden, norm_for(after, after_norm)); });
    }
    each_together(hidden, norm_for(head, norm));
    multiply(head, normed_.data(), low_normed_, step.logits, Then::store, layers[0].qkv, [] {});
}

// What follows the last attention works row by row, and only these rows are asked for: they come to the front. They
// ascend, so nothing is overwritten before it is moved.
void Model::gather(const Step& step) {
    const long hidden = shape.hidden, q_width = shape.heads * shape.dim;
    for (long r = 0; r < step.rows; ++r) {
        const long from = step.wanted[r];
        if (from == r) continue;
        std::copy_n(attended_.data() + from * q_width, q_width, attended_.data() + r * q_width);
        std::copy_n(hidden_.data() + from * hidden, hidden, hidden_.data() + r * hidden);
    }
}
