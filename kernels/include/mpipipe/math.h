// exp, tanh and erf without branches or calls: a loop over them vectorises on every instruction set.
//
// float32 in and out; relative error of exp below 2e-7 where the result is a normal number.
#pragma once

#include <cstdint>
#include <cstring>

namespace mpipipe {

// e^x. Below -87.3 the result is 0 or the smallest normal number, above 88.7 infinity; NaN stays NaN.
// 2^n * e^r with r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], e^r by its polynomial (Cephes, Moshier 1989).
inline float exp_(float x) {
    const float clamped = x < -87.33f ? -87.33f : (x > 88.72f ? 88.72f : x);
    const float n = __builtin_rintf(clamped * 1.44269504f);
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n in two factors: n may be 128
    const int32_t whole = static_cast<int32_t>(n), half = whole / 2;
    const int32_t bits[2] = {(half + 127) << 23, (whole - half + 127) << 23};
    float factor[2];
    std::memcpy(factor, bits, sizeof factor);
    const float result = p * factor[0] * factor[1];
    return x < -87.33f ? 0.0f : (x > 88.72f ? __builtin_inff() : (x != x ? x : result));
}

}  // namespace mpipipe
