// exp, the logistic function and the normal distribution without branches or calls: a loop over them vectorises on
// every instruction set.
//
// float32 in and out; relative error of exp and sigmoid below 2e-7 where the result is a normal number.
#pragma once

#include <cstdint>
#include <cstring>

#include "mpipipe/cuda.h"

namespace mpipipe {

// e^x: 0 below -86.6 and infinity above 88.7; NaN stays NaN.
// 2^(n - 1) * 2 e^r with r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], e^r by its polynomial (Cephes, Moshier 1989), twice:
// n may be 128. The sum with 1.5 * 2^23 + 126 rounds to n, and its low bits are those of an exponent of n - 1.
MPIPIPE_ANYWHERE inline float exp_(float x) {
    constexpr float kMagic = 12582912.0f + 126.0f;
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
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits <<= 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    const float result = p * power, finite = x > 88.72f ? __builtin_inff() : result;
    return x < -86.6f ? 0.0f : finite;
}

// 1 / (1 + e^-x). Below -88.7 the result is 0; NaN stays NaN.
MPIPIPE_ANYWHERE inline float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }

struct Normal {
    float cdf, density;
};

// P(X <= x) and its derivative, for X normal with mean 0 and variance 1. Both are relative to e^(-x^2 / 2), the left
// tail keeps its digits too: P(X <= -z) = e^(-z^2 / 2) R(z), with R a polynomial in t = 1 / (1 + 0.35 z). Its
// coefficients are a minimax fit, of relative error 3e-8, to erfcx(z / sqrt 2) / 2 for z in [0, 13.3]; beyond, e^ is 0.
MPIPIPE_ANYWHERE inline Normal normal(float x) {
    const float z = __builtin_fabsf(x), t = 1.0f / (1.0f + 0.35f * z), e = exp_(-0.5f * x * x);
    float r = -2.9115182485e-02f;
    r = r * t + 1.4381920970e-01f;
    r = r * t - 2.5539260375e-01f;
    r = r * t + 1.5879831797e-01f;
    r = r * t - 2.2844582553e-02f;
    r = r * t + 1.0539261110e-01f;
    r = r * t + 1.1986297847e-01f;
    r = r * t + 1.3985757613e-01f;
    r = r * t + 1.3962165957e-01f;
    const float tail = e * (r * t);
    return {x > 0.0f ? 1.0f - tail : tail, e * 0.398942280f};
}

}  // namespace mpipipe
