#include "matrix.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "reader.h"
#include "transpose.h"

namespace {

using Byte = unsigned char;

std::uint16_t half_at(const Byte* p) {
    std::uint16_t h;
    std::memcpy(&h, p, 2);
    return h;
}
std::uint32_t word_at(const Byte* p) {
    std::uint32_t w;
    std::memcpy(&w, p, 4);
    return w;
}

float float_at(const Byte* p) {
    float f;
    std::memcpy(&f, p, 4);
    return f;
}

// Input i of a row of single numbers.
float number(Source source, const void* row, long i) {
    if (source == Source::f32) return static_cast<const float*>(row)[i];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(row)[i];
    return source == Source::f16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// One group of one output: what llama.cpp calls a block, or what quantising makes.
struct Block {
    std::uint16_t scale, least;
    std::uint32_t words[GROUP / 4];  // four neighbouring inputs each, a byte for one
};

Block q4_block(const Byte* from, bool with_least) {
    Block b{half_at(from), 0, {}};
    b.least = with_least ? half_at(from + 2) : float_to_half(-8.0f * half_to_float(b.scale));
    const Byte* bytes = from + (with_least ? 4 : 2);
    for (int i = 0; i < 4; ++i) {
        const std::uint32_t w = word_at(bytes + 4 * i);
        b.words[i] = w & 0x0f0f0f0fu, b.words[4 + i] = w >> 4 & 0x0f0f0f0fu;
    }
    return b;
}

Block q8_block(const Byte* from) {
    Block b{half_at(from), 0, {}};
    for (int i = 0; i < GROUP / 4; ++i) b.words[i] = word_at(from + 2 + 4 * i) ^ 0x80808080u;
    return b;
}

// Numbers of 8 bits, to nearest.
struct Scale {
    explicit Scale(float scale) : scale(scale), inverse(scale > 0 ? 1.0f / scale : 0.0f) {}
    int number(float x) const { return static_cast<int>(std::lrintf(std::min(127.0f, std::max(-127.0f, x * inverse)))); }
    const float scale, inverse;
};

Block quantised(Source source, const void* row, long first, long count) {
    float x[GROUP], most = 0;
    for (long i = 0; i < GROUP; ++i) {
        x[i] = i < count ? number(source, row, first + i) : 0.0f;
        most = std::max(most, std::fabs(x[i]));
    }
    Block b{float_to_half(most / 127.0f), 0, {}};
    const Scale scale(half_to_float(b.scale));
    for (int i = 0; i < GROUP; ++i) b.words[i / 4] |= static_cast<std::uint32_t>(scale.number(x[i]) + 128) << 8 * (i % 4);
    return b;
}

Block block_of(Source source, const void* row, long group, long k) {
    const Byte* bytes = static_cast<const Byte*>(row);
    switch (source) {
        case Source::q8_0: return q8_block(bytes + group * 34);
        case Source::q4_0: return q4_block(bytes + group * 18, false);
        case Source::q4_1: return q4_block(bytes + group * 20, true);
        default: return quantised(source, row, group * GROUP, std::min(GROUP, k - group * GROUP));
    }
}

// Of a strip of EDGE outputs, one group: as tiles read it.
void put_in_strip(Format format, Byte* group, long column, const Block& b) {
    std::memcpy(group + 2 * column, &b.scale, 2);
    for (long i = 0; i < GROUP; ++i) {
        const Byte number = static_cast<Byte>(b.words[i / 4] >> 8 * (i % 4));
        const long row = i / 2, place = 2 * column + i % 2;
        if (format == Format::p8)
            group[2 * EDGE + row * 2 * EDGE + place] = number ^ 0x80;
        else
            group[4 * EDGE + row / 4 * 4 * EDGE + 2 * place + row % 4 / 2] |= static_cast<Byte>(number << 4 * (row % 2));
    }
}
// What p4 makes of a least value.
struct Zero {
    Zero(std::uint16_t scale, std::uint16_t least) : rest(least) {
        const float step = half_to_float(scale), low = half_to_float(least), most = -low / step;
        const int q = most > 0 ? static_cast<int>(std::lrintf(std::min(15.0f, most))) : 0;
        // As good as always a half too: a multiple of the scale's last place, and not larger than the scale's half. If not,
        // the least value is far below 0 with all of the weights.
        const float left = std::fma(step, static_cast<float>(q), low);
        if (q == 0 || half_to_float(float_to_half(left)) != left) return;
        zero = q, rest = float_to_half(left);
    }
    int zero = 0;
    std::uint16_t rest;
};
void put_zero(Byte* strip, const Matrix& m, long g, long column, const Block& b) {
    const Zero of(b.scale, b.least);
    std::memcpy(strip + g * m.unit_bytes() + 2 * EDGE + 2 * column, &of.rest, 2);
    strip[m.zeros_at(g) + column] = static_cast<Byte>(16 - of.zero);
}
// An output of a strip of single numbers.
void put_in_strip(const void* row, long k, Byte* strip, long column) {
    for (long i = 0; i < k; i += 2)
        std::memcpy(strip + i / 2 * TILE_K + 4 * column, static_cast<const std::uint16_t*>(row) + i, 4);
}

void put(Format format, Byte* group, long lane, const Block& b) {
    std::memcpy(group + 2 * lane, &b.scale, 2);
    if (format == Format::q8) {
        for (long i = 0; i < GROUP / 4; ++i) std::memcpy(group + NR * 2 + (i * NR + lane) * 4, &b.words[i], 4);
        return;
    }
    std::memcpy(group + NR * 2 + 2 * lane, &b.least, 2);
    for (long i = 0; i < GROUP / 4; ++i) {
        Byte* at = group + NR * 4 + (i * VL + lane % VL) * 4;
        const std::uint32_t w = lane < VL ? b.words[i] : word_at(at) | b.words[i] << 4;
        std::memcpy(at, &w, 4);
    }
}

Format format_of(Source source, Products by) {
    if (by == Products::tiles) return source == Source::q4_0 || source == Source::q4_1 ? Format::t4 : Format::t8;
    switch (source) {
        case Source::q8_0: return by == Products::parts ? Format::p8 : Format::q8;
        case Source::q4_0:
        case Source::q4_1: return by == Products::parts ? Format::p4 : Format::q4;
        default: break;
    }
    if (by == Products::whole) return Format::q8;
    if (by == Products::parts) return Format::p16;
    return source == Source::f32 ? Format::f32 : source == Source::f16 ? Format::f16 : Format::bf16;
}

// Where the tile is that holds input kk of the panel's output `lane`.
template <class B>
B* tile_of(B* panel, Format format, long lane, long kk) {
    return panel + NR * 4 + (kk / TILE_K * (NR / EDGE) + lane / EDGE) * (format == Format::t4 ? TILE4_BYTES : TILE_BYTES);
}
long place_in_tile(long lane, long kk) { return kk / 4 * EDGE * 4 + lane % EDGE * 4 + kk % 4; }

// A row of GROUPs of llama.cpp's 4 bits, or of what becomes 8.
void pack_t4(Source source, const void* row, long k, long lane, Byte* to) {
    const long groups = k / GROUP;
    float most = 0;
    for (long g = 0; g < groups; ++g) {
        const Block b = block_of(source, row, g, k);
        const float scale = half_to_float(b.scale), least = half_to_float(b.least);
        for (long i = 0; i < GROUP; ++i)
            most = std::max(most, std::fabs(scale * static_cast<float>(b.words[i / 4] >> 8 * (i % 4) & 15) + least));
    }
    const Scale row_scale(most / 127.0f);
    const float inverse = row_scale.inverse;
    std::memcpy(to + 4 * lane, &row_scale.scale, 4);
    for (long g = 0; g < groups; ++g) {
        const Block b = block_of(source, row, g, k);
        Byte* tile = tile_of(to, Format::t4, lane, g * GROUP);
        const long half = g % 2, at = (half * EDGE + lane % EDGE) * 2;
        const std::int16_t step = static_cast<std::int16_t>(std::lrintf(half_to_float(b.scale) * inverse * 128.0f));
        // a half so that the division rounds to nearest
        const std::int16_t least = static_cast<std::int16_t>(std::lrintf(half_to_float(b.least) * inverse * 128.0f) + 64);
        std::memcpy(tile + at, &step, 2), std::memcpy(tile + 4 * EDGE + at, &least, 2);
        for (long i = 0; i < GROUP; ++i)
            tile[8 * EDGE + place_in_tile(lane, i)] |= static_cast<Byte>((b.words[i / 4] >> 8 * (i % 4) & 15) << 4 * half);
    }
}
void pack_t8(Source source, const void* row, long k, long lane, Byte* to) {
    Lines<float> x(k);
    float most = 0;
    for (long i = 0; i < k; ++i) {
        if (source == Source::q8_0) {
            const Byte* block = static_cast<const Byte*>(row) + i / GROUP * 34;
            x[i] = half_to_float(half_at(block)) * static_cast<float>(static_cast<std::int8_t>(block[2 + i % GROUP]));
        } else {
            x[i] = number(source, row, i);
        }
        most = std::max(most, std::fabs(x[i]));
    }
    const Scale scale(most / 127.0f);
    std::memcpy(to + 4 * lane, &scale.scale, 4);
    for (long i = 0; i < k; ++i)
        tile_of(to, Format::t8, lane, i)[place_in_tile(lane, i % TILE_K)] = static_cast<Byte>(scale.number(x[i]));
}
// Outputs and inputs that are not there are zeros.
void pack_tiles(Source source, Format format, const void* const* rows, long k, long bytes, Byte* to) {
    std::memset(to, 0, bytes);
    for (long lane = 0; lane < NR; ++lane)
        if (rows[lane]) (format == Format::t4 ? pack_t4 : pack_t8)(source, rows[lane], k, lane, to);
}

void pack_strips(const Matrix& m, Source source, const void* const* rows, Byte* to) {
    std::memset(to, 0, m.panel_bytes());
    for (long lane = 0; lane < NR; ++lane) {
        if (!rows[lane]) continue;
        Byte* strip = to + lane / EDGE * m.strip_bytes();
        if (m.format == Format::p16) {
            put_in_strip(rows[lane], m.k, strip, lane % EDGE);
            continue;
        }
        for (long g = 0; g < m.groups(); ++g) {
            const Block b = block_of(source, rows[lane], g, m.k);
            put_in_strip(m.format, strip + g * m.unit_bytes(), lane % EDGE, b);
            if (m.format == Format::p4) put_zero(strip, m, g, lane % EDGE, b);
        }
    }
}

template <class T>
void pack_numbers(const void* const* rows, long k, T* to) {
    for (long kk = 0; kk < k; ++kk)
        for (long j = 0; j < NR; ++j) to[kk * NR + j] = rows[j] ? static_cast<const T*>(rows[j])[kk] : T(0);
}

template <Format F>
void unpack_groups(const Byte* from, long bytes, long groups, float* out) {
    Reader<F> reader;
    for (; groups; --groups, from += bytes) {
        reader.group(from);
        for (long i = 0; i < GROUP / 4; ++i) {
            reader.four(i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j, out += NR) v_store(out, reader.get(j, 0)), v_store(out + VL, reader.get(j, 1));
        }
    }
}

}  // namespace

void Matrix::pack(Source source, const void* const* rows, const float* given_bias, Pool& pool, Arena& arena) {
    for (long i = 0; source == Source::q4_0 && i < (pairs ? 2 * n : n); ++i)
        for (long g = 0; g < groups(); ++g)
            if (std::fabs(half_to_float(half_at(static_cast<const Byte*>(rows[i]) + g * 18))) > 8188.0f)
                throw std::range_error("a least value of -8 times this scale would be no half");
    format = format_of(source, by);
    panels = static_cast<Byte*>(arena.take(count() * panel_bytes()));
    // The weight row of lane `lane` of panel `p`, or -1.
    auto place = [&](long p, long lane) {
        const long out = p * width() + lane % width();
        return out >= n ? -1 : out + (pairs && lane >= VL ? n : 0);
    };
    pool.run(1, [&](Worker& w) {
        w.each(count(), [&](long p) {
            Byte* to = panels + p * panel_bytes();
            const void* from[NR];
            for (long lane = 0; lane < NR; ++lane) from[lane] = place(p, lane) < 0 ? nullptr : rows[place(p, lane)];
            const bool all = std::all_of(from, from + NR, [](const void* row) { return row; });
            if (format == Format::t8 || format == Format::t4) {
                pack_tiles(source, format, from, k, panel_bytes(), to);
            } else if (in_strips()) {
                pack_strips(*this, source, from, to);
            } else if (format == Format::f32 && all) {
                float* floats = reinterpret_cast<float*>(to);
                for (long half = 0; half < NR; half += VL)
                    transpose(reinterpret_cast<const float* const*>(from + half), 0, k, floats + half, NR);
            } else if (format == Format::f32) {
                pack_numbers(from, k, reinterpret_cast<float*>(to));
            } else if (format != Format::q8 && format != Format::q4) {
                pack_numbers(from, k, reinterpret_cast<std::uint16_t*>(to));
            } else {
                for (long g = 0; g < groups(); ++g)
                    for (long lane = 0; lane < NR; ++lane)
                        put(format, to + g * group_bytes(), lane, from[lane] ? block_of(source, from[lane], g, k) : Block{});
            }
        });
    });
    if (!given_bias) return;
    bias = static_cast<float*>(arena.take(count() * NR * 4));
    for (long p = 0; p < count(); ++p)
        for (long lane = 0; lane < NR; ++lane) bias[p * NR + lane] = place(p, lane) < 0 ? 0.0f : given_bias[place(p, lane)];
}

void Matrix::row(long row, float* out) const {
    const Byte* from = panel(row / NR);
    const long lane = row % NR;
    for (long kk = 0; kk < k; ++kk) {
        const Byte* group = from + kk / GROUP * group_bytes();
        const long at = kk % GROUP / 4, byte = kk % 4;
        switch (format) {
            case Format::f32: out[kk] = reinterpret_cast<const float*>(from)[kk * NR + lane]; break;
            case Format::f16: out[kk] = half_to_float(reinterpret_cast<const std::uint16_t*>(from)[kk * NR + lane]); break;
            case Format::bf16: out[kk] = bfloat_to_float(reinterpret_cast<const std::uint16_t*>(from)[kk * NR + lane]); break;
            case Format::q8:
                out[kk] = half_to_float(half_at(group + 2 * lane)) *
                          static_cast<float>(group[NR * 2 + (at * NR + lane) * 4 + byte] - 128);
                break;
            case Format::q4: {
                const int both = group[NR * 4 + (at * VL + lane % VL) * 4 + byte], q = lane < VL ? both & 15 : both >> 4;
                out[kk] = half_to_float(half_at(group + 2 * lane)) * static_cast<float>(q) +
                          half_to_float(half_at(group + NR * 2 + 2 * lane));
                break;
            }
            case Format::p16: {
                const Byte* strip = from + lane / EDGE * strip_bytes();
                out[kk] = bfloat_to_float(half_at(strip + kk / 2 * TILE_K + 4 * (lane % EDGE) + 2 * (kk % 2)));
                break;
            }
            case Format::p8:
            case Format::p4: {
                const Byte *strip = from + lane / EDGE * strip_bytes(), *unit = strip + kk / GROUP * unit_bytes();
                const long column = lane % EDGE, row = kk % GROUP / 2, place = 2 * column + kk % 2;
                const float scale = half_to_float(half_at(unit + 2 * column));
                if (format == Format::p8) {
                    out[kk] = scale * static_cast<float>(static_cast<std::int8_t>(unit[2 * EDGE + row * 2 * EDGE + place]));
                    break;
                }
                const int q = unit[4 * EDGE + row / 4 * 4 * EDGE + 2 * place + row % 4 / 2] >> 4 * (row % 2) & 15;
                const int zero = 16 - strip[zeros_at(kk / GROUP) + column];
                out[kk] = scale * static_cast<float>(q - zero) + half_to_float(half_at(unit + 2 * EDGE + 2 * column));
                break;
            }
            case Format::t8: {
                const Byte* tile = tile_of(from, format, lane, kk);
                out[kk] = float_at(from + 4 * lane) * static_cast<float>(static_cast<std::int8_t>(tile[place_in_tile(lane, kk % TILE_K)]));
                break;
            }
            case Format::t4: {
                const Byte* tile = tile_of(from, format, lane, kk);
                const long half = kk % TILE_K / GROUP, about = (half * EDGE + lane % EDGE) * 2;
                const int q = tile[8 * EDGE + place_in_tile(lane, kk % GROUP)] >> 4 * half & 15;
                const int step = static_cast<std::int16_t>(half_at(tile + about));
                const int least = static_cast<std::int16_t>(half_at(tile + 4 * EDGE + about));
                out[kk] = float_at(from + 4 * lane) * static_cast<float>(static_cast<std::int8_t>((step * q + least) >> 7));
                break;
            }
        }
    }
}

void Matrix::unpack(long index, long first, long count, float* out) const {
    const Byte* from = panel(index);
    if (format == Format::q8 || format == Format::q4) {
        const auto unpack_all = format == Format::q8 ? unpack_groups<Format::q8> : unpack_groups<Format::q4>;
        return unpack_all(from + first / GROUP * group_bytes(), group_bytes(), (count + GROUP - 1) / GROUP, out);
    }
    const std::uint16_t* halves = reinterpret_cast<const std::uint16_t*>(from) + first * NR;
    for (long i = 0; i < count * NR; i += VL)
        v_store(out + i, format == Format::f16 ? h_load(halves + i) : b_load(halves + i));
}
