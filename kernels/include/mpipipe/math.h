// exp, the logistic function and the normal distribution without branches or calls: a loop over them vectorises on
// every instruction set.
//
// float32 in and out; relative error of exp and sigmoid below 2e-7 where the result is a normal number.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "mpipipe/cuda.h"

namespace mpipipe {

// x + kMagic, for |x| < 2^21, rounds to an integer n, and its low bits are those of an exponent of n - 1.
constexpr float kMagic = 12582912.0f + 126.0f;  // 1.5 * 2^23, and the bias of the exponent less 1

// 2^(n - 1), with `shifted` = n + kMagic; 0 for n = -126.
MPIPIPE_ANYWHERE inline float half_power(float shifted) {
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits <<= 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

// e^x: 0 below -86.6 and infinity above 88.7; NaN stays NaN.
// 2^(n - 1) * 2 e^r with r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], e^r by its polynomial (Cephes, Moshier 1989), twice:
// n may be 128.
MPIPIPE_ANYWHERE inline float exp_(float x) {
    const float shifted = x * 1.44269504f + kMagic, n = shifted - kMagic;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 2 * 1.9875691500e-4f;
    p = p * r + 2 * 1.3981999507e-3f;
    p = p * r + 2 * 8.3334519073e-3f;
    p = p * r + 2 * 4.1665795894e-2f;
    p = p * r + 2 * 1.6666665459e-1f;
    p = p * r + 2 * 5.0000001201e-1f;
    p = p * (r * r) + (2 * r + 2.0f);
    const float result = p * half_power(shifted), finite = x > 88.72f ? __builtin_inff() : result;
    return x < -86.6f ? 0.0f : finite;
}

// 1 / (1 + e^-x). Below -88.7 the result is 0; NaN stays NaN.
MPIPIPE_ANYWHERE inline float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }

// c0 + c1 x + c2 x^2 + ..., of a float or of a vector of them
template <typename X>
MPIPIPE_ANYWHERE inline float polynomial(X, float c0) { return c0; }
template <typename X, typename... Rest>
MPIPIPE_ANYWHERE inline X polynomial(X x, float c0, Rest... rest) {
    return polynomial(x, rest...) * x + c0;
}

struct Normal {
    float density, mills;
};

// For X normal with mean 0 and variance 1: its density at z >= 0, and Mills' ratio, P(X > z) / density. Their product,
// the tail, keeps its digits however small it is. Beyond 13.2 the density is 0; NaN stays NaN.
// The density is 2^(n - 1) times 2 / sqrt(2 pi) 2^r, r in [-1/2, 1/2], by a polynomial, and Mills' ratio a quotient of
// two. They are minimax fits, of relative error 1e-7 and 3e-8, and P(X > 0) is 1/2; those for T = bf16, where half a
// unit in the last place of a result is at least 2e-3, 8e-5 and 3e-5, and less near z = 0.75, the ratio itself, where
// the derivative of GELU is 0. That z^2 is rounded before the exponential takes up to 8e-6 at z = 12.
template <typename T>
MPIPIPE_ANYWHERE inline Normal normal(float z) {
    constexpr bool kFine = std::is_same_v<T, float>;
    const float c = z > 13.2f ? 13.2f : z;  // where n is -126
    const float scaled = c * -0.72134752f, shifted = scaled * c + kMagic, r = scaled * c - (shifted - kMagic);
    const float power = kFine ? polynomial(r, 7.978845835e-01f, 5.530512929e-01f, 1.916697621e-01f, 4.428844899e-02f,
                                           7.716750726e-03f, 1.058372087e-03f)
                              : polynomial(r, 7.978271842e-01f, 5.531422496e-01f, 1.935756803e-01f, 4.402062297e-02f);
    const float above = kFine ? polynomial(c, 1.253314137e+00f, 1.091516852e+00f, 4.540364146e-01f, 1.000803784e-01f,
                                           1.005573571e-02f)
                              : polynomial(c, 1.253346086e+00f, 6.864060760e-01f, 1.518696547e-01f);
    const float below = kFine ? polynomial(c, 1.0f, 1.668789387e+00f, 1.193765879e+00f, 4.639252722e-01f,
                                           1.000878438e-01f, 1.005559042e-02f)
                              : polynomial(c, 1.0f, 1.346253753e+00f, 6.921179295e-01f, 1.516606808e-01f);
    return {half_power(shifted) * power, above / below};
}

// P(X <= x), with the digits that T needs; the left tail keeps them too.
template <typename T>
MPIPIPE_ANYWHERE inline float normal_cdf(float x) {
    const Normal n = normal<T>(__builtin_fabsf(x));
    const float tail = n.density * n.mills;
    return x > 0.0f ? 1.0f - tail : tail;
}

}  // namespace mpipipe
