#include "step.h"

#include <algorithm>

#include "rows.h"

namespace {
constexpr int PHASES = 10;     // of one layer, at most
constexpr long ALONE = 10000;  // floats that one thread normalises faster than several agree on it
}

void Model::reserve(long tokens) {
    auto grow = [tokens](std::vector<float>& v, long width) {
        if ((long)v.size() < tokens * width) v.resize(tokens * width);
    };
    grow(hidden_, shape.hidden), grow(normed_, shape.hidden), grow(attended_, shape.heads * shape.dim);
    grow(qkv_, (shape.heads + 2 * shape.kv_heads) * shape.dim), grow(inner_, shape.intermediate);
}

void Model::forward(const Step& step) {
    reserve(step.sequences.tokens);
    plan_.build(step.sequences, step.pages, shape.heads, pool.size());
    pool.run(static_cast<int>(shape.layers) * PHASES + 4, [&](Worker& w) { run(w, step); });
}

// Norm and turn a token's q and k in place; k and v go to the pool unless the token is there already.
void Model::place(const Layer& layer, const Step& step, long index, long token) {
    const long dim = shape.dim, heads = shape.heads, kv_heads = shape.kv_heads;
    float* row = qkv_.data() + token * (heads + 2 * kv_heads) * dim;
    const float* angles = step.angles + step.positions[token] * dim;
    for (long h = 0; h < heads + kv_heads; ++h) {
        const auto& norm = h < heads ? layer.q_norm : layer.k_norm;
        if (!norm.empty()) rms_norm(row + h * dim, norm.data(), shape.eps, dim, row + h * dim);
        rotate(row + h * dim, angles, dim, row + h * dim);
    }
    const long slot = step.sequences.slots[token], size = step.pages.block_size;
    if (slot < 0) return;
    for (int value = 0; value < 2; ++value)
        std::copy_n(row + (heads + value * kv_heads) * dim, kv_heads * dim,
                    step.pages.at(slot / size, index, value, slot % size));
}

void Model::run(Worker& w, const Step& step) {
    const long hidden = shape.hidden, q_width = shape.heads * shape.dim;
    const long qkv_width = (shape.heads + 2 * shape.kv_heads) * shape.dim;
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
    long rows = step.sequences.tokens;
    // What works row by row is too little for several threads when there are few rows: the thread that finishes the
    // phase before does it on its way.
    auto alone = [&] { return rows * hidden <= ALONE; };
    auto norm_row = [&](const std::vector<float>& weight, long r) {
        rms_norm(hidden_.data() + r * hidden, weight.data(), shape.eps, hidden, normed_.data() + r * hidden);
    };
    auto norm_alone = [&](const std::vector<float>& weight) {
        for (long r = 0; alone() && r < rows; ++r) norm_row(weight, r);
    };
    auto norm_together = [&](const std::vector<float>& weight) {
        if (!alone()) w.each(rows, [&](long r) { norm_row(weight, r); });
    };

    w.each(
        rows, [&](long r) { (tied ? head : embed).row(step.ids[r], hidden_.data() + r * hidden); },
        [&] { norm_alone(layers[0].input_norm); });
    for (long i = 0; i < shape.layers; ++i) {
        const Layer& layer = layers[i];
        const bool final = i + 1 == shape.layers;
        norm_together(layer.input_norm);
        linear(w, layer.qkv, normed_.data(), hidden, rows, qkv_.data(), qkv_width, Then::store, &layer.o, [&] {
            for (long r = 0; alone() && r < rows; ++r) place(layer, step, i, r);
        });
        if (!alone()) w.each(rows, [&](long r) { place(layer, step, i, r); });
        plan_.run(w, qkv_.data(), qkv_width, step.pages, i, scale, attended_.data(), [&] {
            if (final) gather(step);
        });
        if (final) rows = step.rows;
        linear(w, layer.o, attended_.data(), q_width, rows, hidden_.data(), hidden, Then::add, &layer.gate_up,
               [&] { norm_alone(layer.post_norm); });
        norm_together(layer.post_norm);
        linear(w, layer.gate_up, normed_.data(), hidden, rows, inner_.data(), shape.intermediate, Then::swiglu, &layer.down,
               [] {});
        linear(w, layer.down, inner_.data(), shape.intermediate, rows, hidden_.data(), hidden, Then::add,
               final ? &head : &layers[i + 1].qkv, [&] { norm_alone(final ? norm : layers[i + 1].input_norm); });
    }
    norm_together(norm);
    linear(w, head, normed_.data(), hidden, rows, step.logits, shape.vocab, Then::store, &layers[0].qkv, [] {});
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
