// The meaning of the bias and GELU: the formulas of the header, element by element, in double. Slow on purpose.
#include "mpipipe/bias_gelu.h"

#include <cmath>
#include <vector>

namespace mpipipe::reference {
namespace {

const double kPi = std::acos(-1.0);

double gelu(double h, bool tanh) {
    if (tanh) return h / 2 * (1 + std::tanh(std::sqrt(2 / kPi) * (h + 0.044715 * h * h * h)));
    return h / 2 * std::erfc(-h / std::sqrt(2.0));
}

double derivative(double h, bool tanh) {
    if (!tanh) return std::erfc(-h / std::sqrt(2.0)) / 2 + h * std::exp(-h * h / 2) / std::sqrt(2 * kPi);
    const double root = std::sqrt(2 / kPi), t = std::tanh(root * (h + 0.044715 * h * h * h));
    return (1 + t) / 2 + h / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * h * h);
}

template <typename T, typename B>
double biased(const T* x, const B* bias, size_t r, size_t i, size_t d) {
    return static_cast<double>(wide(x[r * d + i])) + (bias ? wide(bias[i]) : 0);
}

}  // namespace

template <typename T, typename B>
void bias_gelu(const T* x, const B* bias, bool tanh, T* y, size_t rows, size_t d, int) {
    for (size_t r = 0; r < rows; ++r)
        for (size_t i = 0; i < d; ++i)
            y[r * d + i] = narrow<T>(static_cast<float>(gelu(biased(x, bias, r, i, d), tanh)));
}

template <typename T, typename B>
void bias_gelu_backward(const T* dy, const T* x, const B* bias, bool tanh, T* dx, B* dbias, size_t rows, size_t d,
                        int) {
    std::vector<double> sum(d);
    for (size_t r = 0; r < rows; ++r) {
        for (size_t i = 0; i < d; ++i) {
            const double gradient = wide(dy[r * d + i]) * derivative(biased(x, bias, r, i, d), tanh);
            dx[r * d + i] = narrow<T>(static_cast<float>(gradient));
            sum[i] += gradient;
        }
    }
    for (size_t i = 0; dbias && i < d; ++i) dbias[i] = narrow<B>(static_cast<float>(sum[i]));
}

template decltype(bias_gelu<float, float>) bias_gelu<float, float>;
template decltype(bias_gelu<bf16, bf16>) bias_gelu<bf16, bf16>;
template decltype(bias_gelu<bf16, float>) bias_gelu<bf16, float>;
template decltype(bias_gelu_backward<float, float>) bias_gelu_backward<float, float>;
template decltype(bias_gelu_backward<bf16, bf16>) bias_gelu_backward<bf16, bf16>;
template decltype(bias_gelu_backward<bf16, float>) bias_gelu_backward<bf16, float>;

}  // namespace mpipipe::reference
