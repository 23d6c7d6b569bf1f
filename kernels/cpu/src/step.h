// One forward step of a Llama-family model, all layers in one call.
#pragma once
#include <atomic>
#include <thread>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "populate.h"

struct Shape {
    long vocab, hidden, layers, heads, kv_heads, dim, intermediate;
    float eps;
};

struct Layer {
    Lines<float> input_norm, post_norm, q_norm, k_norm;  // q_norm, k_norm may be empty
    Matrix qkv, o, gate_up, down;
};

struct Step {
    Sequences sequences;
    const long* ids;          // [tokens]
    const long* positions;    // [tokens]
    const long* wanted;       // [rows] tokens whose logits are asked for
    long rows;
    const float* angles;      // [positions, dim]: cos [dim / 2], sin [dim / 2]
    Pages pages;
    long blocks;              // of the pool
    float* logits;            // [rows, vocab]
};

class Model {
  public:
    Model(const Shape& shape, int threads) : shape(shape), pool(threads), layers(shape.layers) {}
    ~Model() {
        leaving_ = true;
        populate_.end();
        settled();
    }
    void forward(const Step& step);
    // What may wait until a server has started (Arena::collapse), on a thread of its own; settled() waits for it.
    void settle() {
        if (!settling_.joinable()) settling_ = std::thread([this] { arena.collapse(leaving_); });
    }
    void settled() {
        if (settling_.joinable()) settling_.join();
    }

    const Shape shape;
    Pool pool;
    Arena arena;
    std::vector<Layer> layers;
    Lines<float> norm;
    Matrix embed;    // read row by row; empty when tied to head
    Matrix head;
    bool tied = false;
    bool tiles = false;  // some matrix multiplies by them

  private:
    void reserve(long tokens);
    void run(Worker& w, const Step& step);
    void gather(const Step& step);
    void place(const Layer& layer, const Step& step, long index, long token);

    std::atomic<bool> leaving_{false};
    std::thread settling_;
    Populate populate_;
    AttentionPlan plan_;
    std::vector<Buffers> buffers_;
    Lines<float> hidden_, normed_, qkv_, attended_, inner_;
    LowRows low_normed_, low_attended_, low_inner_;  // the same, where the next matrix does not multiply in float32
};
