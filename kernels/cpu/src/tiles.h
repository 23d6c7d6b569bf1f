// The processor's matrix tiles (Intel AMX), where it has them and the system lends them.
#pragma once
#include <cstdint>

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define TILES 1
#endif

constexpr long EDGE = 16;          // rows of a tile, and 32-bit numbers of its row
constexpr long TILE_K = 64;        // bytes of its row
constexpr long TILE_BYTES = EDGE * TILE_K;
constexpr long TILE4_BYTES = 4 * EDGE * 2 + TILE_BYTES / 2;  // of one in format t4
constexpr long TILES_K = 65536;    // inputs whose products surely have a sum of 32 bits: 128 * 128 * k

// Whether this process may use them. Asks the system the first time.
bool tiles_there();

#if defined(TILES)
#include <immintrin.h>
// What was written is in memory: compilers do not know all that an instruction for tiles reads.
static inline void settle(const void* p) { asm volatile("" ::"r"(p) : "memory"); }
// The first four hold zeros.
static inline void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
#endif

// For a thread that has Tiles: the first six have so many rows from now on, and hold nothing.
void shape_tiles(long rows);
// While it lives its thread has eight tiles of EDGE rows of 64 bytes.
class Tiles {
  public:
    explicit Tiles(bool wanted);
    ~Tiles();
    Tiles(const Tiles&) = delete;

  private:
    const bool wanted_;
};
