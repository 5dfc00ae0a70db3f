// The two forms of GELU and their derivatives, for one number. Formulas: mpipipe/bias_gelu.h.
// `T`: the type that the result is rounded to, the finest one where there are several.
#pragma once

#include "mpipipe/math.h"

namespace mpipipe {

struct Exact {
    template <typename T>
    MPIPIPE_ANYWHERE static float value(float h) {
        return h * normal_cdf<T>(h);
    }
    // P(X <= h) + h density(h); left of 0 both have the density as a factor, right of it is 1 less what is left of it.
    template <typename T>
    MPIPIPE_ANYWHERE static float derivative(float h) {
        const float z = __builtin_fabsf(h);
        const Normal n = normal<T>(z);
        const float left = n.density * (n.mills - z);
        return h > 0.0f ? 1.0f - left : left;
    }
};

// (1 + tanh u) / 2 is the logistic function of 2 u.
struct Tanh {
    static constexpr float kLinear = 1.595769122f, kCubic = kLinear * 0.044715f;  // 2 u = kLinear h + kCubic h^3
    template <typename>
    MPIPIPE_ANYWHERE static float value(float h) {
        return h * sigmoid(h * (kLinear + kCubic * h * h));
    }
    template <typename>
    MPIPIPE_ANYWHERE static float derivative(float h) {
        // far out it is 0 or 1, where its factors overflow
        const float c = h < -10.0f ? -10.0f : (h > 10.0f ? 10.0f : h), squared = c * c;
        const float e = exp_(-c * (kLinear + kCubic * squared)), s = 1.0f / (1.0f + e);
        return s + c * (e * s * s) * (kLinear + 3 * kCubic * squared);  // e s is 1 - s with all its digits
    }
};

}  // namespace mpipipe
