// The meaning of BatchNorm: the formulas of the header, one channel after the other, in double. Slow on purpose.
#include "mpipipe/batch_norm.h"

#include <cmath>

namespace mpipipe::reference {
namespace {

template <typename T>
double value(T x) {
    return static_cast<double>(wide(x));
}

double or_else(const float* p, size_t i, double missing) { return p ? static_cast<double>(p[i]) : missing; }

// body(index) for every element of a channel
template <typename Body>
void each(size_t batch, size_t channels, size_t places, size_t channel, Body body) {
    for (size_t b = 0; b < batch; ++b)
        for (size_t i = 0; i < places; ++i) body((b * channels + channel) * places + i);
}

}  // namespace

template <typename T>
void batch_norm(const T* x, const T* residual, const float* weight, const float* bias, float eps, bool relu, T* y,
                float* mean, float* variance, float* rstd, size_t batch, size_t channels, size_t places, int) {
    const double n = static_cast<double>(batch * places);
    for (size_t c = 0; c < channels; ++c) {
        double centre = 0, squares = 0;
        each(batch, channels, places, c, [&](size_t i) { centre += value(x[i]) / n; });
        each(batch, channels, places, c,
             [&](size_t i) { squares += (value(x[i]) - centre) * (value(x[i]) - centre); });
        mean[c] = static_cast<float>(n ? centre : 0 / n);
        variance[c] = static_cast<float>(squares / (n - 1));
        rstd[c] = static_cast<float>(1 / std::sqrt(squares / n + eps));
        each(batch, channels, places, c, [&](size_t i) {
            const double h = (value(x[i]) - mean[c]) * rstd[c];
            T t = narrow<T>(static_cast<float>(h * or_else(weight, c, 1) + or_else(bias, c, 0)));
            if (residual) t = narrow<T>(static_cast<float>(value(t) + value(residual[i])));
            y[i] = relu && value(t) < 0 ? narrow<T>(0) : t;
        });
    }
}

template <typename T>
void batch_norm_backward(const T* dy, const T* x, const T* y, const float* weight, const float* bias,
                         const float* mean, const float* rstd, bool relu, T* dx, T* dresidual, float* dweight,
                         float* dbias, size_t batch, size_t channels, size_t places, int) {
    const double n = static_cast<double>(batch * places);
    for (size_t c = 0; c < channels; ++c) {
        const double w = or_else(weight, c, 1), centre = mean[c], scaling = rstd[c];
        const auto h = [&](size_t i) { return (value(x[i]) - centre) * scaling; };
        const auto g = [&](size_t i) {
            const double t = y ? value(y[i]) : h(i) * w + or_else(bias, c, 0);
            return relu && t <= 0 ? 0 : value(dy[i]);
        };
        double sum_g = 0, sum_gh = 0;
        each(batch, channels, places, c, [&](size_t i) { sum_g += g(i), sum_gh += g(i) * h(i); });
        if (dweight) dweight[c] = static_cast<float>(sum_gh);
        if (dbias) dbias[c] = static_cast<float>(sum_g);
        each(batch, channels, places, c, [&](size_t i) {
            dx[i] = narrow<T>(static_cast<float>(w * scaling * (g(i) - sum_g / n - h(i) * sum_gh / n)));
            if (dresidual) dresidual[i] = narrow<T>(static_cast<float>(g(i)));
        });
    }
}

template decltype(batch_norm<float>) batch_norm<float>;
template decltype(batch_norm<bf16>) batch_norm<bf16>;
template decltype(batch_norm_backward<float>) batch_norm_backward<float>;
template decltype(batch_norm_backward<bf16>) batch_norm_backward<bf16>;

}  // namespace mpipipe::reference
