// What a step of AdamW does to each element, as numbers that are the same for all of them (mpipipe/adamw.h).
//
//     g = factor * grad      m += first (g - m)      v = keep v + second g^2      w = decay w - rate m / (sqrt(v) + eps)
#pragma once

#include <cmath>
#include <cstdint>

namespace mpipipe {

// Both sides of the quotient are multiplied by sqrt(1 - beta2^step): one rounding less for each element.
struct Coefficients {
    float factor, first, keep, second, eps, decay, rate;
};

inline Coefficients coefficients(double factor, double lr, double beta1, double beta2, double eps, double weight_decay,
                                 int64_t step) {
    const double bias = 1 - std::pow(beta1, step), root = std::sqrt(1 - std::pow(beta2, step));
    const auto f = [](double x) { return static_cast<float>(x); };
    return {f(factor),     f(1 - beta1),          f(beta2),         f(1 - beta2),
            f(eps * root), f(1 - lr * weight_decay), f(lr * root / bias)};
}

}  // namespace mpipipe
