// Layer norm (Ba, Kiros, Hinton: "Layer normalization", 2016) and RMS norm (Zhang, Sennrich: "Root mean square layer
// normalization", 2019) of the rows of a matrix, with the addition of a residual stream in the same pass.
//
//     s = x + residual                     the new residual stream; s is x where there is no residual
//     h = (s - mean) * rstd                layer norm: rstd = 1 / sqrt(mean((s - mean)^2) + eps)
//     h = s * rstd                         RMS norm:   rstd = 1 / sqrt(mean(s^2) + eps)
//     y = h * weight + bias                RMS norm has no bias
//
// Contract: matrices are contiguous, (rows, d); weight and bias (d,); mean and rstd (rows,) in float32. T is float or
// bf16; R, the type of residual and of its gradient, is T, or bf16 with T float: of autocast, where the stream x stays
// in float32 and a branch is added to it. Everything is computed in float32. No pointer that is written may overlap
// another one. rows or d may be 0. Pointers that may be null: residual (and then s), weight (ones), bias (zeros), ds
// (zeros), dresidual, dweight and dbias (not wanted). NaN and infinity go the way of the formula. The bits do not
// depend on `threads`, nor on whether the addition is made here or before: s is rounded to T before the mean, the
// gradient of the norm before ds is added, and dresidual is dx rounded to R.
#pragma once

#include <cstddef>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {
namespace reference {

template <typename T, typename R>
void layer_norm(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y, float* mean,
                float* rstd, size_t rows, size_t d, int threads);
template <typename T, typename R>
void layer_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd,
                         T* dx, R* dresidual, T* dweight, T* dbias, size_t rows, size_t d, int threads);
template <typename T, typename R>
void rms_norm(const T* x, const R* residual, const T* weight, float eps, T* s, T* y, float* rstd, size_t rows,
              size_t d, int threads);
template <typename T, typename R>
void rms_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* rstd, T* dx, R* dresidual,
                       T* dweight, size_t rows, size_t d, int threads);

}  // namespace reference

namespace cpu {

// Writes s (where there is a residual), y, mean and rstd.
template <typename T, typename R>
void layer_norm(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y, float* mean,
                float* rstd, size_t rows, size_t d, int threads);

// From the gradients of y and s: dx, which is that of x, and of residual too where R is T; dresidual, that of residual
// whatever R is; and those of weight and bias.
template <typename T, typename R>
void layer_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd,
                         T* dx, R* dresidual, T* dweight, T* dbias, size_t rows, size_t d, int threads);

// As layer_norm, without mean and bias.
template <typename T, typename R>
void rms_norm(const T* x, const R* residual, const T* weight, float eps, T* s, T* y, float* rstd, size_t rows,
              size_t d, int threads);

// As layer_norm_backward, without mean and bias.
template <typename T, typename R>
void rms_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* rstd, T* dx, R* dresidual,
                       T* dweight, size_t rows, size_t d, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`.
namespace cuda {

template <typename T, typename R>
void layer_norm(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y, float* mean,
                float* rstd, size_t rows, size_t d, CudaStream stream);
template <typename T, typename R>
void layer_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd,
                         T* dx, R* dresidual, T* dweight, T* dbias, size_t rows, size_t d, CudaStream stream);
template <typename T, typename R>
void rms_norm(const T* x, const R* residual, const T* weight, float eps, T* s, T* y, float* rstd, size_t rows,
              size_t d, CudaStream stream);
template <typename T, typename R>
void rms_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* rstd, T* dx, R* dresidual,
                       T* dweight, size_t rows, size_t d, CudaStream stream);

}  // namespace cuda
}  // namespace mpipipe

// The pairs of T and R that there are, at the end of each file that defines these templates.
#define MPIPIPE_INSTANTIATE_NORM(KERNEL) \
    template decltype(KERNEL<float, float>) KERNEL<float, float>; \
    template decltype(KERNEL<bf16, bf16>) KERNEL<bf16, bf16>; \
    template decltype(KERNEL<float, bf16>) KERNEL<float, bf16>;
