// The two forms of GELU and their derivatives, for one number. Formulas: mpipipe/bias_gelu.h.
#pragma once

#include "mpipipe/math.h"

namespace mpipipe {

struct Exact {
    MPIPIPE_ANYWHERE static float value(float h) { return h * normal(h).cdf; }
    MPIPIPE_ANYWHERE static float derivative(float h) {
        const Normal n = normal(h);
        return n.cdf + h * n.density;
    }
};

// (1 + tanh u) / 2 is the logistic function of 2 u.
struct Tanh {
    static constexpr float kLinear = 1.595769122f, kCubic = kLinear * 0.044715f;  // 2 u = kLinear h + kCubic h^3
    MPIPIPE_ANYWHERE static float value(float h) { return h * sigmoid(h * (kLinear + kCubic * h * h)); }
    MPIPIPE_ANYWHERE static float derivative(float h) {
        // far out it is 0 or 1, where its factors overflow
        const float c = h < -10.0f ? -10.0f : (h > 10.0f ? 10.0f : h), squared = c * c;
        const float e = exp_(-c * (kLinear + kCubic * squared)), s = 1.0f / (1.0f + e);
        return s + c * (e * s * s) * (kLinear + 3 * kCubic * squared);  // e s is 1 - s with all its digits
    }
};

}  // namespace mpipipe
