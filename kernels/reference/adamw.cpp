// The formula of the header, element by element in double. Slow on purpose.
#include "mpipipe/adamw.h"

#include <cmath>
#include <type_traits>

namespace mpipipe::reference {

template <typename T>
void adamw(T* param, T* grad, float* m, float* v, float* master, size_t n, double factor, double lr, double beta1,
           double beta2, double eps, double weight_decay, int64_t step, int) {
    for (size_t i = 0; i < n; ++i) {
        const double g = factor * wide(grad[i]);
        const double mean = m[i] + (1 - beta1) * (g - m[i]);
        const double square = beta2 * v[i] + (1 - beta2) * g * g;
        const double old = std::is_same_v<T, float> ? wide(param[i]) : master[i];
        const double rate = lr / (1 - std::pow(beta1, step));
        const double root = std::sqrt(square / (1 - std::pow(beta2, step)));
        const float w = static_cast<float>((1 - lr * weight_decay) * old - rate * mean / (root + eps));
        m[i] = static_cast<float>(mean);
        v[i] = static_cast<float>(square);
        param[i] = narrow<T>(w);
        if (!std::is_same_v<T, float>) master[i] = w;
        grad[i] = T{};
    }
}

template decltype(adamw<float>) adamw<float>;
template decltype(adamw<bf16>) adamw<bf16>;

}  // namespace mpipipe::reference
