// The C interface that kernels/cpu/library.py calls. No torch headers: raw pointers in, so one build serves every torch.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <stdexcept>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "step.h"

#define API extern "C" __attribute__((visibility("default")))

static_assert(sizeof(long) == 8, "int64 arrays come in as long");

namespace {

struct Attention {
    explicit Attention(int threads) : pool(threads) {}
    Pool pool;
    AttentionPlan plan;
};

Lines<float> copied(const float* p, long n) { return p ? Lines<float>(p, p + n) : Lines<float>(); }

Products products(int low, Source source, long k) {
    const bool exact = source == Source::q8_0 || source == Source::q4_0 || source == Source::q4_1 || source == Source::bf16;
    if (!low) return exact && k % GROUP == 0 && tiles_there() ? Products::parts : Products::floats;
    return tiles_there() && k <= TILES_K ? Products::tiles : Products::whole;
}

// ints: query_lens [S], seq_lens [S], table_starts [S + 1], slots [T], tables.
const long* sequences(const long* ints, long tokens, long count, Sequences& s) {
    s = {tokens, count, ints, ints + count, ints + 2 * count, nullptr, ints + 3 * count + 1};
    s.tables = s.slots + tokens;
    return s.tables + s.table_starts[count];
}

}  // namespace

API const char* ck_simd() { return SIMD_NAME; }
// How whole numbers are multiplied.
API const char* ck_low_simd() { return low_simd(); }
API const char* ck_bf16_simd() { return bf16_simd(); }

// Gives freed memory back to the system: what a loader used for weights that have been packed since.
API void ck_trim() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

API void* ck_model_new(const long* shape, float eps, int threads) {
    try {
        return new Model({shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], eps}, threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}
API void ck_model_free(void* model) { delete static_cast<Model*>(model); }

// which: 0 qkv, 1 o, 2 gate_up, 3 down of a layer; 4 head, 5 embed. rows: where each output's weights lie, in the format
// `source`; low: products in 8 bits, by tiles where the processor has them. Returns 0, 1 when there is no memory, or 2 when a scale
// is too large.
API int ck_model_linear(void* handle, long layer, int which, long n, long k, int source, const void* const* rows,
                        const float* bias, int low) {
    auto& model = *static_cast<Model*>(handle);
    Matrix* m = which == 4 ? &model.head : which == 5 ? &model.embed : nullptr;
    if (!m) {
        auto& l = model.layers[layer];
        m = which == 0 ? &l.qkv : which == 1 ? &l.o : which == 2 ? &l.gate_up : &l.down;
    }
    m->n = n, m->k = k, m->pairs = which == 2, m->by = products(low, static_cast<Source>(source), k);
    model.tiles = model.tiles || by_tiles(m->by);
    try {
        m->pack(static_cast<Source>(source), rows, bias, model.pool, model.arena);
    } catch (const std::range_error&) {
        return 2;
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}
// Bytes that the packed weights take.
API long ck_model_bytes(void* handle) { return static_cast<Model*>(handle)->arena.taken(); }
API void ck_model_norms(void* handle, long layer, const float* input, const float* post, const float* q, const float* k) {
    auto& model = *static_cast<Model*>(handle);
    auto& l = model.layers[layer];
    l.input_norm = copied(input, model.shape.hidden), l.post_norm = copied(post, model.shape.hidden);
    l.q_norm = copied(q, model.shape.dim), l.k_norm = copied(k, model.shape.dim);
}
API void ck_model_finish(void* handle, const float* norm, int tied) {
    auto& model = *static_cast<Model*>(handle);
    model.norm = copied(norm, model.shape.hidden);
    model.tied = tied != 0;
}

// See Model::settle; wait: until it is done. Returns 0, or 1 when there is no thread.
API int ck_model_settle(void* handle, int wait) {
    auto& model = *static_cast<Model*>(handle);
    try {
        model.settle();
        if (wait) model.settled();
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

// ints: what `sequences` reads, then ids [T], positions [T], wanted [R]. kept: what the pages keep, as in attention.h.
// Returns 0, or 1 when there is no memory.
API int ck_model_forward(void* handle, const long* ints, long tokens, long count, long rows, const float* angles,
                         void* pages, int kept, long blocks, long block_size, float* logits) {
    auto& model = *static_cast<Model*>(handle);
    const Shape& shape = model.shape;
    Step step;
    step.ids = sequences(ints, tokens, count, step.sequences);
    step.positions = step.ids + tokens;
    step.wanted = step.positions + tokens;
    step.rows = rows;
    step.angles = angles;
    step.pages = {pages, static_cast<Kept>(kept), shape.layers, block_size, shape.kv_heads, shape.dim};
    step.blocks = blocks;
    step.logits = logits;
    try {
        model.forward(step);
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

API void* ck_attention_new(int threads) {
    try {
        return new Attention(threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}
API void ck_attention_free(void* handle) { delete static_cast<Attention*>(handle); }

// Writes k, v, then attention of one layer. q, k, v: rows of heads x dim with strides in floats; out contiguous.
API int ck_attention(void* handle, const long* ints, long tokens, long count, const float* q, long ldq, const float* k,
                     long ldk, const float* v, long ldv, void* pages, int kept, const long* shape, long layer,
                     float scale, float* out) {
    auto& a = *static_cast<Attention*>(handle);
    const Pages p{pages, static_cast<Kept>(kept), shape[0], shape[1], shape[2], shape[3]};
    Sequences s;
    sequences(ints, tokens, count, s);
    try {
        a.plan.build(s, p, shape[4], a.pool.size());
        a.pool.run(AttentionPlan::PHASES + 1, [&](Worker& w) {
            Tiles lent(a.plan.tiles());
            w.each(tokens, [&](long t) { p.write(s.slots[t], layer, k + t * ldk, v + t * ldv); });
            a.plan.run(w, q, ldq, p, layer, scale, out, [] {});
        });
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

// y [rows, n] = x [rows, k] W^T (+ bias), for tests and the bench. Packs W anew each time; returns the seconds of the
// fastest of `repeat` products, or -1.
API double ck_linear(int threads, const float* x, long rows, int source, const void* const* weights, const float* bias,
                     long n, long k, int low, float* y, int repeat) {
    try {
        Pool pool(threads);
        Matrix m;
        m.n = n, m.k = k, m.by = products(low, static_cast<Source>(source), k);
        Arena arena;
        m.pack(static_cast<Source>(source), weights, bias, pool, arena);
        LowRows low_x;
        low_x.shape(m.by, rows, k);
        for (long r = 0; r < rows; ++r) low_x.set(m.by, r, x + r * k);
        std::vector<Buffers> buffers(threads);
        double best = 1e9;
        for (int i = 0; i < repeat; ++i) {
            const auto began = std::chrono::steady_clock::now();
            pool.run(1, [&](Worker& w) {
                Tiles lent(by_tiles(m.by));
                linear(w, {m, x, k, &low_x, rows, y, n, Then::store}, buffers, nullptr, [] {});
            });
            best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
        }
        return best;
    } catch (const std::exception&) {
        return -1;
    }
}
