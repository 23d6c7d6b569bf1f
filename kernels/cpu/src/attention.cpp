#include "attention.h"

#include <algorithm>
#include <limits>

#include "attention_tiles.h"
#include "softmax.h"
#include "tile.h"
#include "transpose.h"

namespace {

constexpr long TILE_ROWS = 96;   // query heads of one piece and KV head
constexpr long MORE_ROWS = 192;  // of bfloat16
constexpr long FEW_ROWS = 64;    // up to which reading is worth hiding
constexpr long SHARED_SPLIT = 4; // segments of a later piece that many sequences share

void finish(float sum, const float* from, float* out, long dim, bool bf16) {
    if (bf16) return tile_finish(from, sum, dim, out);
    vf total = v_set(sum);
    for (long i = 0; i < dim; i += VL) v_store_n(out + i, v_load(from + i) / total, static_cast<int>(dim - i));
}

// Memory that will be read soon, asked for line by line; the last run is empty.
struct Ahead {
    const Run* run;
    const char* at;

    explicit Ahead(const Run* runs) : run(runs), at(runs->begin) {}
    template <int N>
    void fetch() {
        for (int i = 0; i < N && at < run->end; ++i) {
            prefetch(at);
            at += 64;
            if (at >= run->end) at = (++run)->begin;
        }
    }
};

// c [M, W * VL] = a [M, k] times the k rows at b
template <int M, int W, class T>
void product(const float* a, long lda, const T* const* b, long shift, long k, float* c, long ldc, Ahead& ahead) {
    vf acc[M][W];
    Ahead own = ahead;
    tile<M, W>(
        a, lda, [=](long kk) { return b[kk] + shift; }, k, acc, [&] { own.template fetch<std::min(W, 3)>(); });
    ahead = own;
    for (int m = 0; m < M; ++m)
        for (int i = 0; i < W; ++i) v_store(c + m * ldc + i * VL, acc[m][i]);
}
template <class T>
using Product = void (*)(const float*, long, const T* const*, long, long, float*, long, Ahead&);
template <int W, class T, int... I>
constexpr Product<T> pick(int m, std::integer_sequence<int, I...>) {
    constexpr Product<T> table[] = {product<I + 1, W, T>...};
    return table[m - 1];
}
// c [rows, columns] = a [rows, k] times the k rows at b; columns are a multiple of NR.
template <class T>
void products(long rows, const float* a, long lda, const T* const* b, long k, long columns, float* c, long ldc,
              Ahead& ahead) {
    const long tiles = (rows + MR - 1) / MR;
    long row = 0;
    for (long t = 0; t < tiles; ++t) {
        int size = static_cast<int>((rows - row + tiles - t - 1) / (tiles - t));
        for (long j = 0; j < columns;) {
            // Few rows are few independent sums: twice as many columns hide the latency of the additions.
            const bool wide = size <= MR / 2 && columns - j >= 2 * NR;
            auto f = wide ? pick<4, T>(size, std::make_integer_sequence<int, MR / 2>())
                          : pick<2, T>(size, std::make_integer_sequence<int, MR>());
            f(a + row * lda, lda, b, j, k, c + row * ldc + j, ldc, ahead);
            j += wide ? 2 * NR : NR;
        }
        row += size;
    }
}

template <class T>
void write_as(const Pages& pages, long slot, long layer, const float* k, const float* v) {
    for (int value = 0; value < 2; ++value) {
        char* to = pages.at(slot / pages.block_size, layer, value, slot % pages.block_size);
        narrow(value ? v : k, pages.token(), reinterpret_cast<T*>(to));
    }
}

}  // namespace

void Pages::write(long slot, long layer, const float* k, const float* v) const {
    if (slot < 0) return;
    switch (kept) {
        case Kept::f32: return write_as<float>(*this, slot, layer, k, v);
        case Kept::f16: return write_as<Half>(*this, slot, layer, k, v);
        case Kept::bf16: return write_as<Bfloat>(*this, slot, layer, k, v);
    }
}

long AttentionPlan::piece_rows() const { return bf16_ ? MORE_ROWS : TILE_ROWS; }

void AttentionPlan::build(const Sequences& s, const Pages& pages, long heads, int threads) {
    heads_ = heads, kv_heads_ = pages.kv_heads, threads_ = threads;
    width_ = round_up(pages.dim, NR);
    bf16_ = pages.kept == Kept::bf16 && bf16_fits(pages.dim);
    tiles_ = bf16_ && tiles_there();
    rows_.clear(), pieces_.clear(), merges_.clear(), singles_.clear();
    const long group = heads / pages.kv_heads, tile_queries = std::max(1L, piece_rows() / group);
    for (long i = 0, token = 0; i < s.count; token += s.query_lens[i++]) {
        const Single leader{i, token, s.seq_lens[i], s.tables + s.table_starts[i]};
        if (s.query_lens[i] == 1) {
            singles_.push_back(leader);
            continue;
        }
        const long before = s.seq_lens[i] - s.query_lens[i];
        // The last queries see the most keys: they go first, so that no thread is left with a long piece at the end.
        for (long end = s.query_lens[i]; end > 0; end -= tile_queries) {
            const long first = std::max(0L, end - tile_queries), segments = (before + end + SEG - 1) / SEG;
            const long row = static_cast<long>(rows_.size());
            for (long t = first; t < end; ++t) rows_.push_back({token + t, before + t, -1, 0});
            add(row, end - first, leader, 0, segments, segments, false, 1);
        }
    }
    plan_decodes(pages, threads);
    const size_t rows = std::max(piece_rows(), group), all = rows * pages.kv_heads;
    scratch_.resize(threads);
    for (auto& mem : scratch_) {
        const size_t more = bf16_ ? EDGE : 0;  // whole tiles are read and written
        mem.q.resize(all * pages.dim), mem.out.resize((all + more) * width_), mem.most.resize(all), mem.sum.resize(all);
        mem.scores.resize(rows * SEG), mem.piece.resize((rows + more) * width_);
        if (bf16_) {
            mem.q16.resize((all + more) * pages.dim);
            mem.keys16.resize(SEG * pages.dim), mem.values16.resize(SEG * pages.dim);
        }
        mem.seg_most.resize(rows), mem.seg_sum.resize(rows);
        mem.keys.resize(SEG * pages.dim), mem.values.resize(SEG * width_), mem.zeros.resize(width_);
        mem.key_rows.resize(pages.dim);
        for (long i = 0; i < pages.dim; ++i) mem.key_rows[i] = mem.keys.data() + i * SEG;
    }
}

// Pieces of at most `step` segments and `kv_step` KV heads each.
void AttentionPlan::add(long row, long rows, const Single& leader, long first, long end, long step, bool keep,
                        long kv_step) {
    for (long at = first; at < end; at += step)
        for (long kv = 0; kv < kv_heads_; kv += kv_step)
            pieces_.push_back({row, rows, leader.table, at, std::min(end, at + step), leader.keys, kv,
                               std::min(kv_heads_, kv + kv_step), keep});
}

void AttentionPlan::plan_decodes(const Pages& pages, int threads) {
    const long size = pages.block_size;
    // Sequences with common first blocks come to stand side by side.
    std::sort(singles_.begin(), singles_.end(), [size](const Single& a, const Single& b) {
        const long na = (a.keys + size - 1) / size, nb = (b.keys + size - 1) / size;
        for (long i = 0; i < std::min(na, nb); ++i)
            if (a.table[i] != b.table[i]) return a.table[i] < b.table[i];
        return na != nb ? na < nb : a.token < b.token;
    });
    const long row = static_cast<long>(rows_.size());
    for (const Single& single : singles_) rows_.push_back({single.token, single.keys - 1, -1, 0});
    partial_rows_ = 0;
    first_single_ = row;
    // With few sequences each is cut, so that every thread has something to read.
    long segments = 0;
    for (const Single& single : singles_) segments += (single.keys + SEG - 1) / SEG;
    const bool few = static_cast<long>(singles_.size()) < 4L * threads;
    step_ = few ? std::max(1L, segments / (4L * threads)) : std::numeric_limits<long>::max();
    plan_shared(0, static_cast<long>(singles_.size()), 0, pages);
    partials_.resize(partial_rows_ * heads_ * (width_ + 2));
}

// The singles [begin, end) have the segments before `first` in common, and those are planned.
void AttentionPlan::plan_shared(long begin, long end, long first, const Pages& pages) {
    const long size = pages.block_size, tile_queries = std::max(1L, piece_rows() / (heads_ / kv_heads_));
    // Whole segments that two of them have in common.
    auto common = [&](const Single& a, const Single& b) {
        const long keys = std::min(a.keys, b.keys);
        long blocks = 0;
        while (blocks * size < keys && a.table[blocks] == b.table[blocks]) ++blocks;
        return std::min(keys, blocks * size) / SEG;
    };
    while (begin < end) {
        // A run: neighbours that go on together for at least one more segment.
        const Single& leader = singles_[begin];
        long stop = begin + 1, shared = leader.keys;
        for (; stop < end; ++stop) {
            const long both = common(leader, singles_[stop]);
            if (both <= first) break;
            shared = std::min(shared, both);
        }
        if (stop == begin + 1) {
            const long segments = (leader.keys + SEG - 1) / SEG, row = first_single_ + begin;
            const bool keep = first > 0 || segments > step_;
            if (first == 0) rows_[row].merged = std::min(step_, segments);
            if (keep) {
                const long results = segments - rows_[row].merged + 1;
                rows_[row].partial = partial_rows_;
                partial_rows_ += results;
                merges_.push_back({row, results});
            }
            add(row, 1, leader, first, segments, std::min(step_, segments), keep, kv_heads_);
        } else {
            // From the first segment on a piece merges as it goes, so it is not cut; later ones are, where that gives work to
            // more threads.
            const long fair = (stop - begin) * kv_heads_ / threads_, whole_tile = (EDGE * kv_heads_ + heads_ - 1) / heads_;
            const long queries = first ? tile_queries : std::clamp(fair, std::min(whole_tile, tile_queries), tile_queries);
            for (long i = begin; first == 0 && i < stop; ++i) rows_[first_single_ + i].merged = shared;
            for (long at = begin; at < stop; at += queries)
                add(first_single_ + at, std::min(queries, stop - at), leader, first, shared, first ? SHARED_SPLIT : shared, true,
                    first ? kv_heads_ : 1);
            plan_shared(begin, stop, shared, pages);
        }
        begin = stop;
    }
}

void AttentionPlan::piece(const Piece& p, const Piece* next, Scratch& mem, const float* q, long ldq, const Pages& pages, long layer,
                          float scale, float* out) {
    const long dim = pages.dim, group = heads_ / kv_heads_, rows = p.rows * group;
    const Row* tokens = rows_.data() + p.row;
    const bool few = tiles_ && rows <= EDGE;
    for (long kv = p.kv_first; kv < p.kv_end; ++kv) {
        for (long r = 0; r < rows; ++r) {
            const float* from = q + tokens[r / group].token * ldq + (kv * group + r % group) * dim;
            const long at = ((kv - p.kv_first) * rows + r) * dim;
            if (bf16_) {
                tile_narrow(from, scale, dim, few ? mem.keys16.data() + r * dim : mem.q16.data() + at);
                continue;
            }
            float* to = mem.q.data() + at;
            for (long i = 0; i < dim; i += VL) {
                int left = static_cast<int>(dim - i);
                v_store_n(to + i, v_load_n(from + i, left) * v_set(scale), left);
            }
        }
        if (few) tile_queries(rows, mem.keys16.data(), dim, mem.q16.data() + (kv - p.kv_first) * EDGE * dim);
    }
    const auto of_kind = pages.kept == Kept::f32   ? &AttentionPlan::segment<float>
                         : pages.kept == Kept::f16 ? &AttentionPlan::segment<Half>
                                                   : &AttentionPlan::segment<Bfloat>;
    for (long seg = p.first; seg < p.end; ++seg)
        for (long kv = p.kv_first; kv < p.kv_end; ++kv) (this->*of_kind)(p, next, seg, kv, mem, pages, layer);
    if (p.first) return;
    for (long kv = p.kv_first; kv < p.kv_end; ++kv)
        for (long r = 0; r < rows; ++r) {
            const long at = (kv - p.kv_first) * rows + r, head = kv * group + r % group;
            const float* from = mem.out.data() + at * width_;
            if (p.keep)
                keep(tokens[r / group].partial, head, mem.most[at], mem.sum[at], from);
            else
                finish(mem.sum[at], from, out + (tokens[r / group].token * heads_ + head) * dim, dim, bf16_);
        }
}

void AttentionPlan::keep(long at, long head, float most, float sum, const float* from) {
    float* to = partial(at, head);
    to[0] = most, to[1] = sum;
    std::copy_n(from, width_, to + 2);
}

// f(block, offset, j, n) for each stretch of `count` keys from `first` that lies in one block: keys first + j .. + n.
template <class F>
void AttentionPlan::each_run(const Piece& p, long first, long count, long size, F&& f) {
    long block = first / size, offset = first % size;
    for (long j = 0; j < count; ++block, offset = 0) {
        const long n = std::min(size - offset, count - j);
        f(p.table[block], offset, j, n);
        j += n;
    }
}

template <class T>
void AttentionPlan::segment(const Piece& p, const Piece* next, long seg, long kv_head, Scratch& mem, const Pages& pages,
                            long layer) {
    const long dim = pages.dim, group = heads_ / kv_heads_, rows = p.rows * group, size = pages.block_size;
    const long base = (kv_head - p.kv_first) * rows;
    const Row* tokens = rows_.data() + p.row;
    const long first = seg * SEG, there = std::min(SEG, p.keys - first), to_value = size * pages.token();
    // Slots past the sequence's end hold anything, and 0 * NaN is NaN: zeros stand in for them where whole tiles are read. What no
    // row sees is left out otherwise; its weight is zero, which would add nothing to any sum.
    const T *keys[SEG], *values[SEG], *zeros = reinterpret_cast<const T*>(mem.zeros.data());
    std::fill(keys + there, keys + SEG, zeros);
    std::fill(values + there, values + SEG, zeros);
    each_run(p, first, there, size, [&](long block, long offset, long j, long n) {
        const T* key = reinterpret_cast<const T*>(pages.at(block, layer, 0, offset)) + kv_head * dim;
        for (long i = 0; i < n; ++i, key += pages.token()) keys[j + i] = key, values[j + i] = key + to_value;
    });
    if (width_ != dim) {  // whole vectors must be readable
        for (long j = 0; j < SEG; ++j) {
            T* to = reinterpret_cast<T*>(mem.values.data()) + j * width_;
            values[j] = std::copy_n(values[j], dim, to) - dim;
        }
    }
    // With few rows the time goes into reading: the next segment, or the next piece's first, comes nearer while this one
    // is multiplied. All KV heads of a token lie together, and the first of them asks for all.
    if (kv_head == p.kv_first) {
        mem.runs.clear();
        const bool more = seg + 1 < p.end;
        const Piece* soon = more ? &p : next;
        const long from = more ? first + SEG : soon ? soon->first * SEG : 0;
        const long ahead = (bf16_ || rows <= FEW_ROWS) && soon ? std::min(SEG, soon->keys - from) : 0;
        if (ahead > 0) each_run(*soon, from, ahead, size, [&](long block, long offset, long, long n) {
            const long heads = soon->kv_end - soon->kv_first, stretch = heads == kv_heads_ ? n : 1;
            for (int value = 0; value < 2; ++value)
                for (long i = 0; i < n; i += stretch) {
                    const char* at = pages.at(block, layer, value, offset + i) + soon->kv_first * dim * sizeof(T);
                    mem.runs.push_back({at, at + stretch * heads * dim * sizeof(T)});
                }
        });
        mem.runs.push_back({nullptr, nullptr});
        mem.run = 0, mem.run_at = mem.runs[0].begin;
    }
    Ahead coming(mem.runs.data());
    coming.run += mem.run, coming.at = mem.run_at;
    long begin = 0;  // rows whose position is before the segment have nothing here; positions ascend
    while (tokens[begin / group].position < first) begin += group;
    const long count = rows - begin;
    // The first segment's result goes straight to its place.
    const bool fresh = seg == 0;
    float* result = (fresh ? mem.out.data() + base * width_ : mem.piece.data()) + begin * width_;
    float *most = (fresh ? mem.most.data() + base : mem.seg_most.data()) + begin;
    float *sum = (fresh ? mem.sum.data() + base : mem.seg_sum.data()) + begin;
    auto visible = [&](long r) { return std::min(SEG, tokens[(begin + r) / group].position + 1 - first); };
    auto hand_over = [&](long from, long n) {
        for (long r = from; p.first && r < from + n; ++r) {
            const Row& row = tokens[(begin + r) / group];
            keep(row.partial + 1 + seg - row.merged, kv_head * group + (begin + r) % group, most[r], sum[r], result + r * width_);
        }
        if (p.first || fresh) return;
        const long at = base + begin + from;
        merge(n, mem.most.data() + at, mem.sum.data() + at, mem.out.data() + at * width_, most + from, sum + from,
              result + from * width_, width_);
    };
    if (std::is_same_v<T, Bfloat> && bf16_) {
        const auto read = [](const T* const* rows_of) { return reinterpret_cast<const std::uint16_t* const*>(rows_of); };
        const auto fetch = [&] { coming.template fetch<4>(); };
        if (!tiles_ && count <= FEW) {
            const std::uint16_t* q = mem.q16.data() + (base + begin) * dim;
            few_rows(count, q, dim, read(keys), read(values), there, visible, most, sum, result, fetch);
            hand_over(0, count);
        } else {
            if (tiles_ && rows <= EDGE) {
                const std::uint16_t* q = mem.q16.data() + (kv_head - p.kv_first) * EDGE * dim;
                const long multiplied = there > SEG / 2 ? SEG : SEG / 2;
                tile_values(read(values), multiplied, dim, mem.values16.data(), fetch);
                for (long j = 0; j < there; j += EDGE) {
                    for (int i = 0; i < 8; ++i) fetch();
                    const bool as_they_lie = size % EDGE == 0 && j + EDGE <= there;
                    for (long i = 0; !as_they_lie && i < EDGE; ++i)
                        std::copy_n(read(keys)[j + i], dim, mem.keys16.data() + i * dim);
                    tile_scores_of(as_they_lie ? read(keys)[j] : mem.keys16.data(), (as_they_lie ? pages.token() : dim) * 2, q, rows,
                                   dim, j, mem.scores.data());
                }
                tile_some_rows(count, mem.scores.data() + begin * SEG, multiplied, dim, mem.values16.data(), visible, most, sum, result);
                hand_over(0, count);
            } else {
                tile_values(read(values), SEG, dim, mem.values16.data(), fetch);
                tile_keys(read(keys), dim, mem.keys16.data(), fetch);
                tile_rows(count, mem.q16.data() + (base + begin) * dim, dim, mem.keys16.data(), mem.values16.data(), visible, most,
                          sum, result, hand_over);
            }
        }
    } else {
        constexpr long STEP = VL * 4 / sizeof(T);
        for (long j = 0; j < there; j += VL)
            for (long i = 0; i < dim; i += STEP) {
                coming.template fetch<8>();  // evenly over the segment: memory that waits for nobody is memory that idles
                transpose(keys + j, i, std::min(dim, i + STEP), mem.keys.data() + j, SEG);
            }
        const float* q = mem.q.data() + (base + begin) * dim;
        float* scores = mem.scores.data();
        products<float>(count, q, dim, mem.key_rows.data(), dim, round_up(there, NR), scores, SEG, coming);
        soften<false>(scores, count, visible, most, sum, [&](long r, const vf (&weights)[SEG / VL]) {
            for (long j = 0; j < SEG / VL; ++j) v_store(scores + r * SEG + j * VL, weights[j]);
        });
        products<T>(count, scores, SEG, values, there, width_, result, width_, coming);
        hand_over(0, count);
    }
    mem.run = coming.run - mem.runs.data(), mem.run_at = coming.at;
}

void AttentionPlan::run(Worker& w, const float* q, long ldq, const Pages& pages, long layer, float scale, float* out,
                        const std::function<void()>& last) {
    const bool merging = !merges_.empty();
    w.each(
        static_cast<long>(pieces_.size()),
        [&](long i) {
            const size_t soon = i + 1;  // what this thread probably takes next
            const Piece* next = soon < pieces_.size() ? &pieces_[soon] : nullptr;
            piece(pieces_[i], next, scratch_[w.rank], q, ldq, pages, layer, scale, out);
        },
        [&] { merging ? void() : last(); });
    if (!merging) return;
    w.each(
        static_cast<long>(merges_.size()) * heads_,
        [&](long i) {
            const Merge& m = merges_[i / heads_];
            const Row& row = rows_[m.row];
            const long head = i % heads_, dim = pages.dim;
            float* first = partial(row.partial, head);
            for (long i = 1; i < m.results; ++i) {
                const float* other = partial(row.partial + i, head);
                merge(1, first, first + 1, first + 2, other, other + 1, other + 2, width_);
            }
            finish(first[1], first + 2, out + (row.token * heads_ + head) * dim, dim, bf16_);
        },
        last);
}
