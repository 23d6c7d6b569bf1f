// Packed weights of one panel as float32 in registers. Whoever makes float32 of weights does it here, so the bits are the
// same in every tile.
#pragma once
#include "matrix.h"

// Four neighbouring inputs' weights at a time. `at` is where the group begins; `four(i)` turns to inputs 4 i .. 4 i + 3 of
// the group; `get(j, half)` is input 4 i + j of the panel's first or second VL outputs.
template <Format F>
struct Reader;

template <>
struct Reader<Format::f32> {
    const float* at;
    const float* row;
    void group(const unsigned char* from) { at = reinterpret_cast<const float*>(from); }
    void four(long i) { row = at + 4 * i * NR; }
    vf get(int j, int half) const { return v_load(row + j * NR + half * VL); }
};

template <Format F>
struct Halves {
    const std::uint16_t* at;
    const std::uint16_t* row;
    void group(const unsigned char* from) { at = reinterpret_cast<const std::uint16_t*>(from); }
    void four(long i) { row = at + 4 * i * NR; }
    vf get(int j, int half) const {
        const std::uint16_t* p = row + j * NR + half * VL;
        return F == Format::f16 ? h_load(p) : b_load(p);
    }
};
template <>
struct Reader<Format::f16> : Halves<Format::f16> {};
template <>
struct Reader<Format::bf16> : Halves<Format::bf16> {};

template <>
struct Reader<Format::q8> {
    const unsigned char* at;
    vf scale[2], zero[2];
    vi w[2];
    void group(const unsigned char* from) {
        const std::uint16_t* scales = reinterpret_cast<const std::uint16_t*>(from);
        for (int half = 0; half < 2; ++half) {
            scale[half] = h_load(scales + half * VL);
            zero[half] = scale[half] * v_set(-128.0f);  // exact, and so is the fma
        }
        at = from + NR * 2;
    }
    void four(long i) { w[0] = i_load(at + i * NR * 4), w[1] = i_load(at + i * NR * 4 + VL * 4); }
    vf get(int j, int half) const { return v_fma(i_byte(w[half], 8 * j), scale[half], zero[half]); }
};

template <>
struct Reader<Format::q4> {
    const unsigned char* at;
    vf scale[2], least[2];
    vi w;
    void group(const unsigned char* from) {
        const std::uint16_t* scales = reinterpret_cast<const std::uint16_t*>(from);
        for (int half = 0; half < 2; ++half) {
            scale[half] = h_load(scales + half * VL);
            least[half] = h_load(scales + NR + half * VL);
        }
        at = from + NR * 4;
    }
    void four(long i) { w = i_load(at + i * VL * 4); }
    // scale * number is exact: whatever adds the least value rounds once, as the format's definition does
    vf get(int j, int half) const { return v_fma(i_nibble(w, 8 * j + 4 * half), scale[half], least[half]); }
};
