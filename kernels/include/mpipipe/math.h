// exp, the logistic function and the normal distribution without branches or calls: a loop over them vectorises on
// every instruction set.
//
// float32 in and out; relative error of exp and sigmoid below 2e-7 where the result is a normal number.
#pragma once

#include <cstdint>
#include <cstring>

#include "mpipipe/cuda.h"

namespace mpipipe {

// 2^n, n in [-126, 127].
MPIPIPE_ANYWHERE inline float two_to(int32_t n) {
    const int32_t bits = (n + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// e^x. Below -87.3 the result is 0 or the smallest normal number, above 88.7 infinity; NaN stays NaN.
// 2^n * e^r with r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], e^r by its polynomial (Cephes, Moshier 1989).
MPIPIPE_ANYWHERE inline float exp_(float x) {
    // a NaN becomes a number here, of which an integer can be made
    const float above = x > -87.33f ? x : -87.33f, clamped = above < 88.72f ? above : 88.72f;
    // to the nearest integer by a number whose last bit is 1: also where the processor has no instruction for it
    const float n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n in two factors: n may be 128. One at a time: GCC vectorises no loop over an array of two
    const int32_t whole = static_cast<int32_t>(n), half = whole >> 1;
    const float result = p * two_to(half) * two_to(whole - half);
    const float finite = x < -87.33f ? 0.0f : (x > 88.72f ? __builtin_inff() : result);
    return x != x ? x : finite;
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
