// A block for each row, which it reads again for each pass: from the cache, unless a row is very long.
#include "mpipipe/layer_norm.h"

#include "columns.cuh"

namespace mpipipe::cuda {
namespace {

template <typename T>
__device__ float value_or(const T* p, size_t i, float otherwise) {
    return p ? wide(p[i]) : otherwise;
}

// RMS norm is layer norm with the mean taken as 0: `mean` is null. A thread reads of s what it wrote itself.
template <typename T, typename R>
__global__ void forward(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y,
                        float* mean, float* rstd, size_t rows, size_t d) {
    for (size_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const T* row = x + r * d;
        if (residual) {
            for (size_t i = threadIdx.x; i < d; i += kThreads)
                s[r * d + i] = narrow<T>(wide(row[i]) + wide(residual[r * d + i]));
            row = s + r * d;
        }
        float centre = 0;
        if (mean) {
            double sum = 0;
            for (size_t i = threadIdx.x; i < d; i += kThreads) sum += wide(row[i]);
            centre = static_cast<float>(over_block<Sum>(sum) / d);
        }
        double squares = 0;
        for (size_t i = threadIdx.x; i < d; i += kThreads) {
            const float centred = wide(row[i]) - centre;
            squares += centred * centred;
        }
        const float scaling = static_cast<float>(1 / sqrt(over_block<Sum>(squares) / d + eps));
        if (threadIdx.x == 0) {
            if (mean) mean[r] = centre;
            rstd[r] = scaling;
        }
        for (size_t i = threadIdx.x; i < d; i += kThreads)
            y[r * d + i] = narrow<T>((wide(row[i]) - centre) * scaling * value_or(weight, i, 1) + value_or(bias, i, 0));
    }
}

// dx = rstd * (g - mean(g) - h * mean(g * h)), g = dy * weight. The last step is a subtraction, so that no
// multiplication is left that could be fused with the addition of ds: the bits are those of adding it later.
template <typename T, typename R>
__global__ void backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd,
                         T* dx, R* dresidual, size_t rows, size_t d) {
    for (size_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const float centre = mean ? mean[r] : 0.0f, scaling = rstd[r];
        double sum_g = 0, sum_gh = 0;
        for (size_t i = threadIdx.x; i < d; i += kThreads) {
            const float h = (wide(s[r * d + i]) - centre) * scaling, g = wide(dy[r * d + i]) * value_or(weight, i, 1);
            sum_g += g;
            sum_gh += g * h;
        }
        const float mean_g = mean ? static_cast<float>(scaling * over_block<Sum>(sum_g) / d) : 0.0f;
        const float mean_gh = static_cast<float>(scaling * over_block<Sum>(sum_gh) / d);
        for (size_t i = threadIdx.x; i < d; i += kThreads) {
            const float h = (wide(s[r * d + i]) - centre) * scaling, g = wide(dy[r * d + i]) * value_or(weight, i, 1);
            const T gradient = narrow<T>((scaling * g - mean_g) - h * mean_gh);
            const T whole = ds ? narrow<T>(wide(ds[r * d + i]) + wide(gradient)) : gradient;
            dx[r * d + i] = whole;
            if (dresidual) dresidual[r * d + i] = narrow<R>(wide(whole));
        }
    }
}

// Gradients of weight and bias before they are summed over rows.
template <typename T>
struct OfWeight {
    const T *dy, *s;
    const float *mean, *rstd;
    size_t d;
    __device__ float operator()(size_t r, size_t i) const {
        return wide(dy[r * d + i]) * ((wide(s[r * d + i]) - (mean ? mean[r] : 0.0f)) * rstd[r]);
    }
};
template <typename T>
struct OfBias {
    const T* dy;
    size_t d;
    __device__ float operator()(size_t r, size_t i) const { return wide(dy[r * d + i]); }
};

}  // namespace

template <typename T, typename R>
void layer_norm(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y, float* mean,
                float* rstd, size_t rows, size_t d, CudaStream stream) {
    launch(forward<T, R>, dim3(blocks(rows)), stream, x, residual, weight, bias, eps, s, y, mean, rstd, rows, d);
}

template <typename T, typename R>
void layer_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd,
                         T* dx, R* dresidual, T* dweight, T* dbias, size_t rows, size_t d, CudaStream stream) {
    launch(backward<T, R>, dim3(blocks(rows)), stream, dy, ds, s, weight, mean, rstd, dx, dresidual, rows, d);
    if (dweight) sum_rows(OfWeight<T>{dy, s, mean, rstd, d}, rows, d, dweight, stream);
    if (dbias) sum_rows(OfBias<T>{dy, d}, rows, d, dbias, stream);
}

template <typename T, typename R>
void rms_norm(const T* x, const R* residual, const T* weight, float eps, T* s, T* y, float* rstd, size_t rows,
              size_t d, CudaStream stream) {
    launch(forward<T, R>, dim3(blocks(rows)), stream, x, residual, weight, nullptr, eps, s, y, nullptr, rstd, rows, d);
}

template <typename T, typename R>
void rms_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* rstd, T* dx, R* dresidual,
                       T* dweight, size_t rows, size_t d, CudaStream stream) {
    launch(backward<T, R>, dim3(blocks(rows)), stream, dy, ds, s, weight, nullptr, rstd, dx, dresidual, rows, d);
    if (dweight) sum_rows(OfWeight<T>{dy, s, nullptr, rstd, d}, rows, d, dweight, stream);
}

MPIPIPE_INSTANTIATE_NORM(layer_norm)
MPIPIPE_INSTANTIATE_NORM(layer_norm_backward)
MPIPIPE_INSTANTIATE_NORM(rms_norm)
MPIPIPE_INSTANTIATE_NORM(rms_norm_backward)

}  // namespace mpipipe::cuda
