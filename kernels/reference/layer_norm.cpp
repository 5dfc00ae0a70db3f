// The meaning of the norms: the formulas of the header, one row after the other, in double. Slow on purpose.
#include "mpipipe/layer_norm.h"

#include <cmath>
#include <vector>

namespace mpipipe::reference {
namespace {

template <typename T>
double value(const T* p, size_t i, double missing) {
    return p ? static_cast<double>(wide(p[i])) : missing;
}

// RMS norm: `mean` is null.
template <typename T, typename R>
void forward(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y, float* mean,
             float* rstd, size_t rows, size_t d) {
    for (size_t r = 0; r < rows; ++r) {
        std::vector<double> row(d);
        for (size_t i = 0; i < d; ++i) {
            row[i] = wide(x[r * d + i]);
            if (!residual) continue;
            s[r * d + i] = narrow<T>(wide(x[r * d + i]) + wide(residual[r * d + i]));
            row[i] = wide(s[r * d + i]);
        }
        double centre = 0, squares = 0;
        for (size_t i = 0; mean && i < d; ++i) centre += row[i] / d;
        for (size_t i = 0; i < d; ++i) squares += (row[i] - centre) * (row[i] - centre) / d;
        const double scaling = 1 / std::sqrt(squares + eps);
        if (mean) mean[r] = static_cast<float>(centre);
        rstd[r] = static_cast<float>(scaling);
        for (size_t i = 0; i < d; ++i)
            y[r * d + i] = narrow<T>(
                static_cast<float>((row[i] - centre) * scaling * value(weight, i, 1) + value(bias, i, 0)));
    }
}

template <typename T, typename R>
void backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd, T* dx,
              R* dresidual, T* dweight, T* dbias, size_t rows, size_t d) {
    std::vector<double> dw(d), db(d);
    for (size_t r = 0; r < rows; ++r) {
        const double centre = mean ? mean[r] : 0, scaling = rstd[r];
        std::vector<double> g(d), h(d);
        double mean_g = 0, mean_gh = 0;
        for (size_t i = 0; i < d; ++i) {
            const double dyi = wide(dy[r * d + i]);
            h[i] = (wide(s[r * d + i]) - centre) * scaling;
            g[i] = dyi * value(weight, i, 1);
            dw[i] += dyi * h[i];
            db[i] += dyi;
            if (mean) mean_g += g[i] / d;
            mean_gh += g[i] * h[i] / d;
        }
        for (size_t i = 0; i < d; ++i) {
            const double gradient = scaling * (g[i] - mean_g - h[i] * mean_gh);
            dx[r * d + i] = narrow<T>(static_cast<float>(gradient + value(ds, r * d + i, 0)));
            if (dresidual) dresidual[r * d + i] = narrow<R>(wide(dx[r * d + i]));
        }
    }
    for (size_t i = 0; dweight && i < d; ++i) dweight[i] = narrow<T>(static_cast<float>(dw[i]));
    for (size_t i = 0; dbias && i < d; ++i) dbias[i] = narrow<T>(static_cast<float>(db[i]));
}

}  // namespace

template <typename T, typename R>
void layer_norm(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y, float* mean,
                float* rstd, size_t rows, size_t d, int) {
    forward(x, residual, weight, bias, eps, s, y, mean, rstd, rows, d);
}

template <typename T, typename R>
void layer_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd,
                         T* dx, R* dresidual, T* dweight, T* dbias, size_t rows, size_t d, int) {
    backward(dy, ds, s, weight, mean, rstd, dx, dresidual, dweight, dbias, rows, d);
}

template <typename T, typename R>
void rms_norm(const T* x, const R* residual, const T* weight, float eps, T* s, T* y, float* rstd, size_t rows,
              size_t d, int) {
    forward<T, R>(x, residual, weight, nullptr, eps, s, y, nullptr, rstd, rows, d);
}

template <typename T, typename R>
void rms_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* rstd, T* dx, R* dresidual,
                       T* dweight, size_t rows, size_t d, int) {
    backward<T, R>(dy, ds, s, weight, nullptr, rstd, dx, dresidual, dweight, nullptr, rows, d);
}

MPIPIPE_INSTANTIATE_NORM(layer_norm)
MPIPIPE_INSTANTIATE_NORM(layer_norm_backward)
MPIPIPE_INSTANTIATE_NORM(rms_norm)
MPIPIPE_INSTANTIATE_NORM(rms_norm_backward)

}  // namespace mpipipe::reference
