// BatchNorm of a batch in training (Ioffe, Szegedy: "Batch normalization", 2015), with the addition of a residual
// stream and the ReLU that follow it, in the same pass.
//
//     s = (x - mean) * rstd * weight + bias       of each channel: rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//     t = s + residual                            s where there is none
//     y = t < 0 ? 0 : t                           t without `relu`
//
// Contract: tensors are contiguous, (batch, channels, places), of T, float or bf16; what there is one of per channel is
// float32. Sums are made in double, all else in float32. No pointer that is written may overlap another one. Any size
// may be 0. Null: residual, weight (ones), bias (zeros), dresidual, dweight and dbias (not wanted). NaN and infinity go
// the way of the formula. The bits do not depend on `threads`, nor on whether addition and ReLU are made here or
// after: s and t are rounded to T.
#pragma once

#include <cstddef>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {
namespace reference {

template <typename T>
void batch_norm(const T* x, const T* residual, const float* weight, const float* bias, float eps, bool relu, T* y,
                float* mean, float* variance, float* rstd, size_t batch, size_t channels, size_t places, int threads);
template <typename T>
void batch_norm_backward(const T* dy, const T* x, const T* y, const float* weight, const float* bias,
                         const float* mean, const float* rstd, bool relu, T* dx, T* dresidual, float* dweight,
                         float* dbias, size_t batch, size_t channels, size_t places, int threads);

}  // namespace reference

namespace cpu {

// Writes y and the statistics; variance is the unbiased one, over n - 1 elements: NaN of a single one.
template <typename T>
void batch_norm(const T* x, const T* residual, const float* weight, const float* bias, float eps, bool relu, T* y,
                float* mean, float* variance, float* rstd, size_t batch, size_t channels, size_t places, int threads);

// From the gradient of y those of x, residual, weight and bias. Where the ReLU lets pass is told by y, or by x where y
// is null: then there was no residual.
template <typename T>
void batch_norm_backward(const T* dy, const T* x, const T* y, const float* weight, const float* bias,
                         const float* mean, const float* rstd, bool relu, T* dx, T* dresidual, float* dweight,
                         float* dbias, size_t batch, size_t channels, size_t places, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`.
namespace cuda {

template <typename T>
void batch_norm(const T* x, const T* residual, const float* weight, const float* bias, float eps, bool relu, T* y,
                float* mean, float* variance, float* rstd, size_t batch, size_t channels, size_t places,
                CudaStream stream);
template <typename T>
void batch_norm_backward(const T* dy, const T* x, const T* y, const float* weight, const float* bias,
                         const float* mean, const float* rstd, bool relu, T* dx, T* dresidual, float* dweight,
                         float* dbias, size_t batch, size_t channels, size_t places, CudaStream stream);

}  // namespace cuda
}  // namespace mpipipe
