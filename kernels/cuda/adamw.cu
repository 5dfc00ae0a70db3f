#include "mpipipe/adamw.h"

#include <type_traits>

#include "launch.cuh"
#include "mpipipe/adamw_coefficients.h"

namespace mpipipe::cuda {
namespace {

template <typename T>
__global__ void update(Coefficients c, T* param, T* grad, float* m, float* v, float* master, size_t n) {
    for (size_t i = thread(); i < n; i += threads()) {
        const float g = wide(grad[i]) * c.factor;
        const float mean = m[i] + c.first * (g - m[i]);
        const float square = c.keep * v[i] + c.second * (g * g);
        const float old = std::is_same_v<T, float> ? wide(param[i]) : master[i];
        const float w = old * c.decay - c.rate * mean / (sqrtf(square) + c.eps);
        m[i] = mean;
        v[i] = square;
        param[i] = narrow<T>(w);
        if (!std::is_same_v<T, float>) master[i] = w;
        grad[i] = T{};
    }
}

}  // namespace

template <typename T>
void adamw(T* param, T* grad, float* m, float* v, float* master, size_t n, double factor, double lr, double beta1,
           double beta2, double eps, double weight_decay, int64_t step, CudaStream stream) {
    const Coefficients c = coefficients(factor, lr, beta1, beta2, eps, weight_decay, step);
    launch(update<T>, dim3(blocks_of_threads(n)), stream, c, param, grad, m, v, master, n);
}

template decltype(adamw<float>) adamw<float>;
template decltype(adamw<bf16>) adamw<bf16>;

}  // namespace mpipipe::cuda
