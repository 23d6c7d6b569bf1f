#include "attention.h"

#include <algorithm>
#include <limits>

#include "linear.h"

namespace {

constexpr long TILE_ROWS = 96;     // query heads of one piece
constexpr long SPLIT = 8;          // segments of one piece when there are few sequences
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// (most, sum, out) of what is left of a segment, and of the segment, become those of both.
void merge(float& most, float& sum, float* out, float seg_most, float seg_sum, const float* seg_out, long width) {
    float both = std::max(most, seg_most);
    float old_scale = s_exp(most - both), new_scale = s_exp(seg_most - both);
    most = both;
    sum = sum * old_scale + seg_sum * new_scale;
    vf a = v_set(old_scale), b = v_set(new_scale);
    for (long i = 0; i < width; i += VL) v_store(out + i, v_fma(v_load(seg_out + i), b, v_load(out + i) * a));
}

void finish(float sum, const float* from, float* out, long dim) {
    vf total = v_set(sum);
    for (long i = 0; i < dim; i += VL) v_store_n(out + i, v_load(from + i) / total, static_cast<int>(dim - i));
}

// Scores of SEG keys become weights e^(s - most), zero from `visible` on; returns most, sets sum.
float soften(float* scores, long visible, float& sum) {
    vf most = v_set(LOWEST);
    for (long j = 0; j < SEG; j += VL)
        most = v_max(most, v_keep(v_load(scores + j), static_cast<int>(visible - j), v_set(LOWEST)));
    const float top = v_most(most);
    vf total = v_zero();
    for (long j = 0; j < SEG; j += VL) {
        vf p = v_keep(v_exp(v_load(scores + j) - v_set(top)), static_cast<int>(visible - j), v_zero());
        v_store(scores + j, p);
        total = total + p;
    }
    sum = v_sum(total);
    return top;
}

template <int M>
void product(const float* a, long lda, const float* b, long ldb, long k, float* c, long ldc) {
    vf acc[M][2];
    tile<M>(a, lda, b, ldb, k, acc, reinterpret_cast<const char*>(b), 0);
    for (int i = 0; i < M; ++i) v_store(c + i * ldc, acc[i][0]), v_store(c + i * ldc + VL, acc[i][1]);
}
using Product = void (*)(const float*, long, const float*, long, long, float*, long);
template <int... I>
constexpr Product pick(int m, std::integer_sequence<int, I...>) {
    constexpr Product table[] = {product<I + 1>...};
    return table[m - 1];
}
// c [rows, NR] = a [rows, k] b [k, NR]
void products(long rows, const float* a, long lda, const float* b, long ldb, long k, float* c, long ldc) {
    const long tiles = (rows + MR - 1) / MR;
    long row = 0;
    for (long t = 0; t < tiles; ++t) {
        int size = static_cast<int>((rows - row + tiles - t - 1) / (tiles - t));
        pick(size, std::make_integer_sequence<int, MR>())(a + row * lda, lda, b, ldb, k, c + row * ldc, ldc);
        row += size;
    }
}

}  // namespace

void AttentionPlan::build(const Sequences& s, const Pages& pages, long heads, int threads) {
    heads_ = heads;
    width_ = round_up(pages.dim, NR);
    rows_.clear(), pieces_.clear(), merges_.clear(), starts_.clear();
    const long group = heads / pages.kv_heads, tile_queries = std::max(1L, TILE_ROWS / group);
    std::vector<long> singles;
    for (long i = 0, token = 0; i < s.count; token += s.query_lens[i++]) {
        starts_.push_back(token);
        if (s.query_lens[i] == 1) {
            singles.push_back(i);
            continue;
        }
        const long before = s.seq_lens[i] - s.query_lens[i];
        // The last queries see the most keys: they go first, so that no thread is left with a long piece at the end.
        for (long end = s.query_lens[i]; end > 0; end -= tile_queries) {
            const long first = std::max(0L, end - tile_queries), keys = before + end;
            pieces_.push_back({(long)rows_.size(), end - first, s.tables + s.table_starts[i], 0, (keys + SEG - 1) / SEG,
                               keys, false});
            for (long t = first; t < end; ++t) rows_.push_back({token + t, before + t, -1});
        }
    }
    plan_decodes(singles, s, pages, threads);
    const size_t rows = std::max(TILE_ROWS, group);
    scratch_.resize(threads);
    for (auto& mem : scratch_) {
        mem.q.resize(rows * pages.dim), mem.scores.resize(rows * SEG), mem.keys.resize(SEG * pages.dim);
        mem.values.resize(SEG * width_), mem.out.resize(rows * width_), mem.piece.resize(rows * width_);
        mem.zeros.resize(pages.dim), mem.most.resize(rows), mem.sum.resize(rows);
        mem.seg_most.resize(rows), mem.seg_sum.resize(rows);
    }
}

void AttentionPlan::plan_decodes(const std::vector<long>& singles, const Sequences& s, const Pages& pages, int threads) {
    const bool few = (long)singles.size() * pages.kv_heads < 4L * threads;
    long partials = 0;
    for (long i : singles) {
        const long keys = s.seq_lens[i], segments = (keys + SEG - 1) / SEG, step = few ? SPLIT : segments;
        const bool keep = segments > step;
        const long row = (long)rows_.size();
        rows_.push_back({starts_[i], keys - 1, keep ? partials : -1});
        for (long first = 0; first < segments; first += step)
            pieces_.push_back({row, 1, s.tables + s.table_starts[i], first, std::min(segments, first + step), keys, keep});
        if (!keep) continue;
        merges_.push_back({row, segments});
        partials += segments;
    }
    partials_.resize(partials * heads_ * (width_ + 2));
}

void AttentionPlan::piece(const Piece& p, long kv_head, Scratch& mem, const float* q, long ldq, const Pages& pages,
                          long layer, float scale, float* out) {
    const long dim = pages.dim, group = heads_ / pages.kv_heads, rows = p.rows * group, size = pages.block_size;
    const Row* tokens = rows_.data() + p.row;
    for (long r = 0; r < rows; ++r) {
        const float* from = q + tokens[r / group].token * ldq + (kv_head * group + r % group) * dim;
        for (long i = 0; i < dim; i += VL) {
            int left = static_cast<int>(dim - i);
            v_store_n(mem.q.data() + r * dim + i, v_load_n(from + i, left) * v_set(scale), left);
        }
    }
    for (long seg = p.first; seg < p.end; ++seg) {
        // Slots past the sequence's end hold anything, and 0 * NaN is NaN: zeros stand in for them.
        const long first = seg * SEG, there = std::min(SEG, p.keys - first);
        const float* keys[SEG];
        for (long j = 0; j < SEG; ++j) {
            float* to = mem.values.data() + j * width_;
            if (j >= there) {
                keys[j] = mem.zeros.data();
                std::fill(to, to + dim, 0.0f);
                continue;
            }
            const long block = p.table[(first + j) / size], offset = (first + j) % size;
            keys[j] = pages.at(block, layer, 0, offset) + kv_head * dim;
            const float* value = pages.at(block, layer, 1, offset) + kv_head * dim;
            for (long i = 0; i < dim; i += VL) {
                int left = static_cast<int>(dim - i);
                v_store_n(to + i, v_load_n(value + i, left), left);
            }
            const long later = first + SEG + j;
            if (seg + 1 < p.end && later < p.keys) {
                const float* k = pages.at(p.table[later / size], layer, 0, later % size) + kv_head * dim;
                const float* v = pages.at(p.table[later / size], layer, 1, later % size) + kv_head * dim;
                for (long i = 0; i < dim; i += 16) prefetch(k + i), prefetch(v + i);
            }
        }
        for (long j = 0; j < SEG; j += VL)
            transpose(keys + j, dim, mem.keys.data() + j / NR * NR * dim + j % NR, NR);

        long begin = 0;  // rows whose position is before the segment have nothing here; positions ascend
        while (tokens[begin / group].position < first) begin += group;
        const long count = rows - begin;
        for (long j = 0; j < SEG; j += NR)
            products(count, mem.q.data() + begin * dim, dim, mem.keys.data() + j * dim, NR, dim,
                     mem.scores.data() + begin * SEG + j, SEG);
        // The rows' first segment goes straight to its place.
        const bool fresh = p.keep || seg == 0;
        float* result = fresh ? mem.out.data() : mem.piece.data();
        for (long r = begin; r < rows; ++r) {
            float sum, top = soften(mem.scores.data() + r * SEG, std::min(SEG, tokens[r / group].position + 1 - first), sum);
            mem.seg_most[r] = top, mem.seg_sum[r] = sum;
        }
        for (long i = 0; i < width_; i += NR)
            products(count, mem.scores.data() + begin * SEG, SEG, mem.values.data() + i, width_, SEG,
                     result + begin * width_ + i, width_);
        for (long r = begin; r < rows; ++r) {
            if (p.keep) {
                float* to = partial(tokens[r / group].partial + seg, kv_head * group + r % group);
                to[0] = mem.seg_most[r], to[1] = mem.seg_sum[r];
                std::copy_n(result + r * width_, width_, to + 2);
            } else if (seg == 0) {
                mem.most[r] = mem.seg_most[r], mem.sum[r] = mem.seg_sum[r];
            } else {
                merge(mem.most[r], mem.sum[r], mem.out.data() + r * width_, mem.seg_most[r], mem.seg_sum[r],
                      result + r * width_, width_);
            }
        }
    }
    if (p.keep) return;
    for (long r = 0; r < rows; ++r)
        finish(mem.sum[r], mem.out.data() + r * width_,
               out + (tokens[r / group].token * heads_ + kv_head * group + r % group) * dim, dim);
}

void AttentionPlan::run(Worker& w, const float* q, long ldq, const Pages& pages, long layer, float scale, float* out) {
    const long kv_heads = pages.kv_heads;
    w.each((long)pieces_.size() * kv_heads, [&](long i) {
        piece(pieces_[i / kv_heads], i % kv_heads, scratch_[w.rank], q, ldq, pages, layer, scale, out);
    });
    w.each((long)merges_.size() * heads_, [&](long i) {
        const Merge& m = merges_[i / heads_];
        const Row& row = rows_[m.row];
        const long head = i % heads_, dim = pages.dim;
        float* first = partial(row.partial, head);
        for (long seg = 1; seg < m.segments; ++seg) {
            const float* other = partial(row.partial + seg, head);
            merge(first[0], first[1], first + 2, other[0], other[1], other + 2, width_);
        }
        finish(first[1], first + 2, out + (row.token * heads_ + head) * dim, dim);
    });
}
