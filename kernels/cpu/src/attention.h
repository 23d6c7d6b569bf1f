// Causal attention over paged KV (Kwon et al. 2023), in float32 over keys and values that are kept in float32 or in 16 bits,
// with bits that do not depend on how a step is cut.
//
// Keys are looked at in segments of SEG, counted from position 0 whatever the block size is. A segment gives a query head
// (most, sum, weighted values) by one code path; segments are merged left to right (Milakov & Gimelshein 2018, online
// softmax). A piece of work that begins at the first segment merges as it goes; others leave each segment's result for a
// later merge by the same function: same values, same order, same bits.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "arena.h"
#include "pool.h"
#include "softmax.h"

// What the pool keeps. 16 bits are rounded once, when a token's K and V are written; what follows is float32, but for products in
// bfloat16 (bf16_simd).
enum class Kept { f32, f16, bf16 };

// What multiplies the bfloat16 of such a pool: amx-bf16, avx512-bf16, or "" where that is float32, too.
const char* bf16_simd();

// The pool: [blocks, layers, 2, block_size, kv_heads, dim].
struct Pages {
    void* data;
    Kept kept;
    long layers, block_size, kv_heads, dim;

    long token() const { return kv_heads * dim; }
    long number_bytes() const { return kept == Kept::f32 ? 4 : 2; }
    char* at(long block, long layer, int value, long offset) const {
        const long number = ((block * layers + layer) * 2 + value) * block_size * token() + offset * token();
        return static_cast<char*>(data) + number * number_bytes();
    }
    // A token's k and v [kv_heads, dim] go to its slot; -1: they are there already.
    void write(long slot, long layer, const float* k, const float* v) const;
};

// One step's sequences, as flat arrays. Tokens of a sequence are adjacent.
struct Sequences {
    long tokens, count;
    const long *query_lens, *seq_lens;
    const long* table_starts;  // [count + 1] into tables
    const long* tables;
    const long* slots;  // [tokens] block * block_size + offset, or -1
};

// A stretch of memory.
struct Run {
    const char *begin, *end;
};

class AttentionPlan {
  public:
    // Cut the step's work into pieces for `threads`.
    void build(const Sequences& s, const Pages& pages, long heads, int threads);
    // Whether its threads must have made Tiles.
    bool tiles() const { return tiles_; }
    // Phases that `run` takes.
    static constexpr int PHASES = 2;
    // All threads together. q [tokens, heads, dim] with row stride ldq, out [tokens, heads, dim] contiguous. `last` is
    // called once, when out is complete.
    void run(Worker& w, const float* q, long ldq, const Pages& pages, long layer, float scale, float* out,
             const std::function<void()>& last);

  private:
    struct Row {
        long token, position;
        long partial;  // where its results begin in partials_, in rows of heads, or -1
        long merged;   // segments that the first result is of; the others are of one
    };
    struct Piece {
        long row, rows;      // into rows_
        const long* table;   // of a sequence that has these segments' blocks
        long first, end;     // segments
        long keys;           // keys that exist
        long kv_first, kv_end;
        bool keep;           // leave the result in partials_: merged from the first segment on, of later segments each
    };
    struct Merge {
        long row, results;
    };
    // Rows of a KV head lie together: [kv_end - kv_first][rows of tokens x heads of the group].
    struct Scratch {
        Lines<float> q, scores, keys, values, out, piece, zeros;
        Lines<float> most, sum, seg_most, seg_sum;
        Lines<std::uint16_t> q16, keys16, values16;  // for products in bfloat16
        std::vector<const float*> key_rows;
        std::vector<Run> runs;
        long run = 0;
        const char* run_at = nullptr;
    };
    struct Single {
        long sequence, token, keys;
        const long* table;
    };

    long piece_rows() const;
    void plan_decodes(const Pages& pages, int threads);
    void plan_shared(long begin, long end, long first, const Pages& pages);
    void add(long row, long rows, const Single& leader, long first, long end, long step, bool keep, long kv_step);
    // `next`: what this thread reads after it, or null.
    void piece(const Piece& p, const Piece* next, Scratch& mem, const float* q, long ldq, const Pages& pages, long layer,
               float scale, float* out);
    template <class T>
    void segment(const Piece& p, const Piece* next, long seg, long kv_head, Scratch& mem, const Pages& pages, long layer);
    template <class F>
    static void each_run(const Piece& p, long first, long count, long size, F&& f);
    void keep(long at, long head, float most, float sum, const float* from);
    float* partial(long at, long head) { return partials_.data() + (at * heads_ + head) * (width_ + 2); }

    long heads_ = 0, kv_heads_ = 0, threads_ = 0, width_ = 0;   // width_: dim rounded up to NR
    long first_single_ = 0, partial_rows_ = 0;    // where the singles are in rows_; what partials_ must hold
    bool bf16_ = false, tiles_ = false;           // products in bfloat16, by the processor's tiles
    long step_ = 0;                               // segments of a piece of one single
    std::vector<Row> rows_;
    std::vector<Piece> pieces_;
    std::vector<Merge> merges_;
    std::vector<Single> singles_;  // sequences with one query, those with common blocks side by side
    Lines<float> partials_;
    std::vector<Scratch> scratch_;
};
