// Causal attention over paged KV (Kwon et al. 2023), float32, with bits that do not depend on how a step is cut.
//
// Keys are looked at in segments of SEG, counted from position 0 whatever the block size is. A segment gives a query head
// (most, sum, weighted values) by one code path; segments are merged left to right (Milakov & Gimelshein 2018, online
// softmax). A piece of work may cover many segments and merge as it goes, or leave each segment's result for a later
// merge by the same function: same values, same order, same bits.
#pragma once
#include <vector>

#include "pool.h"
#include "simd.h"

constexpr long SEG = 64;
static_assert(SEG % NR == 0);

// The pool: [blocks, layers, 2, block_size, kv_heads, dim].
struct Pages {
    float* data;
    long layers, block_size, kv_heads, dim;

    long token() const { return kv_heads * dim; }
    float* at(long block, long layer, int value, long offset) const {
        return data + ((block * layers + layer) * 2 + value) * block_size * token() + offset * token();
    }
};

// One step's sequences, as flat arrays. Tokens of a sequence are adjacent.
struct Sequences {
    long tokens, count;
    const long *query_lens, *seq_lens;
    const long* table_starts;  // [count + 1] into tables
    const long* tables;
    const long* slots;  // [tokens] block * block_size + offset, or -1
};

class AttentionPlan {
  public:
    // Cut the step's work into pieces for `threads`.
    void build(const Sequences& s, const Pages& pages, long heads, int threads);
    // Phases that `run` takes.
    static constexpr int PHASES = 2;
    // All threads together. q [tokens, heads, dim] with row stride ldq, out [tokens, heads, dim] contiguous.
    void run(Worker& w, const float* q, long ldq, const Pages& pages, long layer, float scale, float* out);

  private:
    struct Row {
        long token, position, partial;  // partial: its first segment's place in partials_, in rows of heads, or -1
    };
    struct Piece {
        long row, rows;      // into rows_
        const long* table;   // of a sequence that has these segments' blocks
        long first, end;     // segments
        long keys;           // keys that exist
        bool keep;           // leave each segment's result in partials_
    };
    struct Merge {
        long row, segments;
    };
    struct Scratch {
        std::vector<float> q, scores, keys, values, out, piece, zeros;
        std::vector<float> most, sum, seg_most, seg_sum;
    };

    void plan_decodes(const std::vector<long>& sequences, const Sequences& s, const Pages& pages, int threads);
    void piece(const Piece& p, long kv_head, Scratch& mem, const float* q, long ldq, const Pages& pages, long layer,
               float scale, float* out);
    float* partial(long at, long head) { return partials_.data() + (at * heads_ + head) * (width_ + 2); }

    long heads_ = 0, width_ = 0;  // width_: dim rounded up to NR
    std::vector<Row> rows_;
    std::vector<Piece> pieces_;
    std::vector<Merge> merges_;
    std::vector<long> starts_;  // first token of each sequence
    std::vector<float> partials_;
    std::vector<Scratch> scratch_;
};
