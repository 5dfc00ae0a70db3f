// float32 vectors as wide as the registers, and products of small matrices held in them (GCC vector extensions:
// the same source for every instruction set).
//
// A block of c stays in registers while the depth is walked; its size is chosen so that there are enough
// independent sums to hide the latency of a multiply-add, and that c, a row of b and an element of a fit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "mpipipe/bf16.h"
#include "mpipipe/math.h"
#ifdef __AVX512DQ__
#include <immintrin.h>
#endif

namespace mpipipe {

constexpr size_t kVectorBytes = __BIGGEST_ALIGNMENT__;  // 64 with AVX-512, 32 with AVX, else 16
constexpr size_t kLanes = kVectorBytes / sizeof(float);
typedef float Vector __attribute__((vector_size(kVectorBytes)));
typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));

inline Vector load(const float* p) {
    Vector x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float* p, Vector x) { std::memcpy(p, &x, sizeof x); }
inline Vector all(float x) { return x - Vector{}; }  // a broadcast alone: x - 0 is x, even of x = -0

// 2^x for x <= 127, relative error below 1e-7; NaN stays NaN, and what is below 2^-126 may be 0.
inline Vector exp2_(Vector x) {
#ifdef __AVX512DQ__  // 2^floor(x) 2^r: one instruction finds r and one multiplies, at any x
    const Vector r = (Vector)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    const Vector p = polynomial(r, 1.0f, 6.931470633e-1f, 2.402290851e-1f, 5.548618361e-2f, 9.673775174e-3f,
                                1.248228946e-3f, 2.156597184e-4f);
    return (Vector)_mm512_maskz_scalef_ps(0xFFFF, (__m512)p, (__m512)x);  // without a mask, GCC 12 warns of its header
#else  // 2^n 2^r: adding 1.5 * 2^23 + 127 rounds to n in the low bits, biased as the exponent of a float32 is
    const Vector magic = all(12582912.0f + 127.0f);
    x = x < -127.0f ? all(-127.0f) : x;
    const Vector shifted = x + magic;
    const Vector r = x - (shifted - magic);
    const Vector p = polynomial(r, 1.0f, 6.931471825e-1f, 2.402264774e-1f, 5.550332367e-2f, 9.618436918e-3f,
                                1.339887385e-3f, 1.535336196e-4f);
    return p * (Vector)((Integers)shifted << 23);
#endif
}

// What products are made of: words of 32 bits, kDepth factors each that follow each other along the depth. That is a
// float32 or, where the processor multiplies pairs of bfloat16 and adds them in float32, two of these. They lie in
// memory of floats, and are moved and never computed with as such.
struct Singles {
    static constexpr size_t kDepth = 1;
    static Vector add_product(Vector sum, float word, Vector words) { return sum + word * words; }
};
#ifdef __AVX512BF16__
struct Pairs {
    static constexpr size_t kDepth = 2;
    static Vector add_product(Vector sum, float word, Vector words) {
        return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(word), (__m512bh)words);
    }
    typedef uint16_t Narrowed __attribute__((vector_size(kVectorBytes)));
    // Rounded to nearest, one after the other; denormal numbers become 0, as they are in products.
    static Narrowed round(Vector first, Vector second) {
        return (Narrowed)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
    // kLanes / 2 words (first[2 i], first[2 i + 1]), and so of the second.
    static void store(Narrowed x, float* first, float* second) {
        std::memcpy(first, &x, sizeof x / 2);
        std::memcpy(second, reinterpret_cast<const char*>(&x) + sizeof x / 2, sizeof x / 2);
    }
    // Words (first[i], second[i]).
    static Vector zip(Narrowed x) { return zip(x, std::make_index_sequence<2 * kLanes>()); }

   private:
    template <size_t... i>
    static Vector zip(Narrowed x, std::index_sequence<i...>) {
        return (Vector)__builtin_shufflevector(x, x, (i / 2 + i % 2 * kLanes)...);
    }
};
#endif

// Of the products of a kernel for tensors of type T.
#ifdef __AVX512BF16__
template <typename T>
using Words = std::conditional_t<std::is_same_v<T, bf16>, Pairs, Singles>;
#else
template <typename T>
using Words = Singles;
#endif

// a0 b0 a1 b1 ..., of the lower and of the upper half of the lanes
template <typename V, size_t... i>
inline void interleave(V a, V b, V& low, V& high, std::index_sequence<i...>) {
    constexpr size_t lanes = sizeof...(i);
    low = __builtin_shufflevector(a, b, (i / 2 + i % 2 * lanes)...);
    high = __builtin_shufflevector(a, b, (lanes / 2 + i / 2 + i % 2 * lanes)...);
}

// to[e * to_stride + i] = each(from[i * stride + e]) for i < kLanes, of which those from `rows` on are 0, and e < n.
// Interleaving the upper with the lower half of a square, log2(kLanes) times, turns it.
template <typename Each>
inline void transpose(const float* from, size_t stride, size_t rows, size_t n, Each each, float* to,
                      size_t to_stride) {
    size_t e = 0;
    for (; e + kLanes <= n; e += kLanes) {
        Vector x[kLanes], y[kLanes];
        for (size_t i = 0; i < kLanes; ++i) x[i] = i < rows ? each(load(from + i * stride + e)) : Vector{};
        for (size_t step = 1; step < kLanes; step *= 2) {
            for (size_t i = 0; i < kLanes / 2; ++i) {
                interleave(x[i], x[i + kLanes / 2], y[2 * i], y[2 * i + 1], std::make_index_sequence<kLanes>());
            }
            std::memcpy(x, y, sizeof x);
        }
        for (size_t i = 0; i < kLanes; ++i) store(to + (e + i) * to_stride, x[i]);
    }
    for (; e < n; ++e) {
        for (size_t i = 0; i < kLanes; ++i) to[e * to_stride + i] = i < rows ? each(from[i * stride + e]) : 0.0f;
    }
}

// What becomes of c (m, n): a b; factors[0] a b; c + a b; factors[i] c + a b, by row; or a b + factors[j], by column.
enum class Into { set, times, add, scale, offset };

struct Left {  // a (m, depth): word (i, k) at p[i * row + k * step]
    const float* p;
    size_t row, step;
};

template <Into into, typename Word, int kRows, int kVectors>
inline void block(Left a, const float* b, size_t ldb, size_t depth, float* c, size_t ldc, const float* factors) {
    Vector sum[kRows][kVectors] = {};
    for (size_t k = 0; k < depth; ++k) {
        Vector row[kVectors];
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) row[j] = load(b + k * ldb + j * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const float x = a.p[i * a.row + k * a.step];
#pragma GCC unroll 8
            for (int j = 0; j < kVectors; ++j) sum[i][j] = Word::add_product(sum[i][j], x, row[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
            float* at = c + i * ldc + j * kLanes;
            if (into == Into::times) sum[i][j] *= factors[0];
            if (into == Into::add) sum[i][j] += load(at);
            if (into == Into::scale) sum[i][j] += load(at) * factors[i];
            if (into == Into::offset) sum[i][j] += load(factors + j * kLanes);
            store(at, sum[i][j]);
        }
    }
}

// Rows in blocks of kRows, what is left in smaller ones.
template <Into into, typename Word, int kRows, int kVectors>
inline void panel(size_t m, Left a, const float* b, size_t ldb, size_t depth, float* c, size_t ldc,
                  const float* factors) {
    for (; m >= kRows; m -= kRows) {
        block<into, Word, kRows, kVectors>(a, b, ldb, depth, c, ldc, factors);
        a.p += kRows * a.row;
        c += kRows * ldc;
        if (into == Into::scale) factors += kRows;
    }
    if constexpr (kRows > 1) {
        constexpr int kFewer = kRows > 4 ? 4 : kRows / 2;
        if (m > 0) panel<into, Word, kFewer, kVectors>(m, a, b, ldb, depth, c, ldc, factors);
    }
}

template <Into into, typename Word, int kRows, int kVectors>
void panels(size_t m, size_t n, Left a, const float* b, size_t ldb, size_t depth, float* c, size_t ldc,
            const float* factors) {
    for (size_t j = 0; j < n; j += kVectors * kLanes) {
        panel<into, Word, kRows, kVectors>(m, a, b + j, ldb, depth, c + j, ldc, factors);
    }
}

// c (m, n) from a (m, depth) and b (depth, n), row strides ldc and ldb; depth, a and b in words. n is a multiple of 16.
// Every element of c is one sum in the order of the depth, whatever m and n: blocks change no bits.
template <Into into, typename Word = Singles>
void multiply(size_t m, size_t n, Left a, const float* b, size_t ldb, size_t depth, float* c, size_t ldc,
              const float* factors = nullptr) {
    if constexpr (kLanes < 16) {  // 16 registers, or 32 of which half will do
        panels<into, Word, 6, 2>(m, n, a, b, ldb, depth, c, ldc, factors);
    } else {
        const size_t vectors = n / kLanes;
        const auto run = vectors % 4 == 0   ? panels<into, Word, 6, 4>
                         : vectors % 5 == 0 ? panels<into, Word, 5, 5>
                         : vectors % 3 == 0 ? panels<into, Word, 8, 3>
                         : vectors % 2 == 0 ? panels<into, Word, 8, 2>
                                            : panels<into, Word, 8, 1>;
        run(m, n, a, b, ldb, depth, c, ldc, factors);
    }
}

}  // namespace mpipipe
