// The sums that a norm makes over what it normalises.
#pragma once

#include <cstddef>

#include "mpipipe/bf16.h"

namespace mpipipe {

// The sum of x, or of (x - centre)^2. Four sums at a time, of a quarter each: one alone would wait for its additions.
template <bool squares, typename T>
[[gnu::noinline]] float run_sum(const T* __restrict x, float centre, size_t n) {
    const auto term = [centre](T element) {
        const float centred = wide(element) - centre;
        return squares ? centred * centred : wide(element);
    };
    const size_t q = n / 4;
    const T *__restrict const x1 = x + q, *__restrict const x2 = x1 + q, *__restrict const x3 = x2 + q;
    float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (size_t i = 0; i < q; ++i) {
        a += term(x[i]);
        b += term(x1[i]);
        c += term(x2[i]);
        d += term(x3[i]);
    }
    for (size_t i = 4 * q; i < n; ++i) a += term(x[i]);
    return (a + b) + (c + d);
}

}  // namespace mpipipe
