// y = x W^T with x and W in whole numbers. The products of a group are summed exactly (int32: any order will do), then
// groups are merged in ascending order: acc = fma(sum, scale of W * scale of x, acc), and in q4 also
// acc = fma(least of W, total of x, acc). Every variant does exactly this, so tiles and instruction sets for whole numbers
// are free to differ.
#include <algorithm>
#include <cmath>

#include "linear.h"
#include "rows.h"
#include "store.h"

namespace {

constexpr int MR8 = VL == 16 ? 6 : VL == 8 ? 3 : 4;  // rows of the largest tile: two sums for each accumulator

// One output vector's share of a group: its scale times the row's, then the sums.
static inline vf merged(vf acc, vi sum, vf weight_scale, float row_scale) {
    return v_fma(i_float(sum), weight_scale * v_set(row_scale), acc);
}

vi four(const std::int8_t* p) {
    std::int32_t word;
    std::memcpy(&word, p, 4);
    return i_set(word);
}

template <int M, bool Q4>
void block(const Product& p, long panel, long row, const char* ahead, long step) {
    const Matrix& m = p.m;
    const Rows8& x = p.low->whole;
    const std::int8_t* numbers[M];
    vf acc[M][2];
    for (int i = 0; i < M; ++i) numbers[i] = x.row(row + i), acc[i][0] = acc[i][1] = v_zero();
    const unsigned char* group = m.panel(panel);
    for (long g = 0; g < x.groups; ++g, group += m.group_bytes()) {
        vi sum[M][2];
        for (int i = 0; i < M; ++i) sum[i][0] = sum[i][1] = i_set(Q4 ? 0 : -128 * x.sums(row + i)[g]);
        const unsigned char* bytes = group + NR * (Q4 ? 4 : 2);
        for (long j = 0; j < step; j += 64) prefetch(ahead + j);
        ahead += step;
#pragma GCC unroll 8
        for (long i4 = 0; i4 < GROUP / 4; ++i4) {
            vi w0, w1;
            if (Q4) {
                const vi both = i_load(bytes + i4 * VL * 4);
                w0 = i_low(both), w1 = i_high(both);
            } else {
                w0 = i_load(bytes + i4 * NR * 4), w1 = i_load(bytes + i4 * NR * 4 + VL * 4);
            }
#pragma GCC unroll 8
            for (int i = 0; i < M; ++i) {
                const vi v = four(numbers[i] + g * GROUP + i4 * 4);
                sum[i][0] = Q4 ? dot_u4(sum[i][0], w0, v) : dot_u8(sum[i][0], w0, v);
                sum[i][1] = Q4 ? dot_u4(sum[i][1], w1, v) : dot_u8(sum[i][1], w1, v);
            }
        }
        const std::uint16_t* scales = reinterpret_cast<const std::uint16_t*>(group);
        for (int half = 0; half < 2; ++half) {
            const vf scale = h_load(scales + half * VL);
            for (int i = 0; i < M; ++i) acc[i][half] = merged(acc[i][half], sum[i][half], scale, x.scales(row + i)[g]);
            if (!Q4) continue;
            const vf least = h_load(scales + NR + half * VL);
            for (int i = 0; i < M; ++i) acc[i][half] = v_fma(least, v_set(x.totals(row + i)[g]), acc[i][half]);
        }
    }
    store<M>(p, panel, row, acc);
}

using Block = void (*)(const Product&, long, long, const char*, long);
template <bool Q4, int... I>
constexpr Block pick(int m, std::integer_sequence<int, I...>) {
    constexpr Block table[] = {block<I + 1, Q4>...};
    return table[m - 1];
}

}  // namespace

void Rows8::shape(long rows, long inputs) {
    given_ = inputs, groups = (inputs + GROUP - 1) / GROUP, k = groups * GROUP;
    grow(numbers_, rows * k), grow(scales_, rows * groups), grow(totals_, rows * groups), grow(sums_, rows * groups);
}

void Rows8::set(long row, const float* x) {
    for (long first = 0; first < groups; first += VL) {  // several at a time: their largest numbers and sums are found together
        const int count = static_cast<int>(std::min<long>(VL, groups - first));
        auto input = [&](int g, long i) {
            const long at = (first + g) * GROUP + i * VL;
            return v_load_n(x + at, static_cast<int>(given_ - at));
        };
        vf most[VL], ill[VL], total[VL];
        for (int g = 0; g < VL; ++g) {
            Extent extent;
            for (long i = 0; g < count && i < GROUP / VL; ++i) extent.see(input(g, i));
            most[g] = extent.most(), ill[g] = extent.ills(), total[g] = v_zero();
        }
        float largest[VL], ills[VL], sum[VL];
        v_store(largest, v_mosts(most)), v_store(ills, v_sums(ill));
        for (int g = 0; g < count; ++g) {
            // Smaller ones would have no finite inverse, and nothing to say.
            const vf inverse = v_set(largest[g] > 1e-30f ? 127.0f / largest[g] : 0.0f);
            for (long i = 0; i < GROUP / VL; ++i) {
                const vf number = v_max(v_min(v_round(input(g, i) * inverse), v_set(127.0f)), v_set(-127.0f));
                to_bytes(number, numbers_.data() + row * k + (first + g) * GROUP + i * VL);
                total[g] = total[g] + number;
            }
        }
        v_store(sum, v_sums(total));  // whole numbers below 2^24: exact
        for (int g = 0; g < count; ++g) {
            const long at = row * groups + first + g;
            scales_[at] = largest[g] / 127.0f + ills[g];
            totals_[at] = scales_[at] * sum[g];
            sums_[at] = static_cast<std::int32_t>(sum[g]);
        }
    }
}

void linear8(const Product& p, const Part& part, const char* ahead) {
    const Matrix& m = p.m;
    const bool q4 = m.format == Format::q4;
    const long tiles = (part.rows + MR8 - 1) / MR8, step = (m.group_bytes() / tiles + 63) / 64 * 64;
    constexpr auto sizes = std::make_integer_sequence<int, MR8>();
    for (long panel = part.panel, end = panel + part.panels; panel < end; ++panel) {
        const char* soon = panel + 1 < end ? reinterpret_cast<const char*>(m.panel(panel + 1)) : ahead;
        long row = part.row;
        for (long t = 0; t < tiles; ++t) {
            int size = static_cast<int>((part.row + part.rows - row + tiles - t - 1) / (tiles - t));
            (q4 ? pick<true>(size, sizes) : pick<false>(size, sizes))(p, panel, row, soon, step);
            soon += m.groups() * step;
            row += size;
        }
    }
}

const char* low_simd() {
    if (tiles_there()) return "amx-int8";
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return "avx512-vnni";
#elif defined(__AVXVNNI__)
    return "avx-vnni";
#else
    return "plain";
#endif
}
