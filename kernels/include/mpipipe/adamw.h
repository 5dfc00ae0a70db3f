// AdamW (Loshchilov and Hutter 2019) over flat buffers, in one pass: clip, step, and the gradient back to zero.
//
//     g = factor * grad            factor: the clip coefficient, 1 where nothing is clipped
//     m = m + (1 - beta1) (g - m)
//     v = beta2 v + (1 - beta2) g^2
//     w = (1 - lr weight_decay) w - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
//     grad = 0
//
// `n` elements of each buffer. T = float: w is `param`, and `master` is 0. T = bf16: w is `master`, which `param` is
// rounded from, to nearest and ties to even. `step` counts from 1. Computed in float32, coefficients in double.
//
// Contract: no buffer overlaps another; no alignment asked, no allocation, no exception, any n including 0. An element
// gets the same bits wherever it lies in the buffers, on any number of threads. NaN and infinity pass as in torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {

namespace reference {

template <typename T>
void adamw(T* param, T* grad, float* m, float* v, float* master, size_t n, double factor, double lr, double beta1,
           double beta2, double eps, double weight_decay, int64_t step, int threads);

}  // namespace reference

namespace cpu {

template <typename T>
void adamw(T* param, T* grad, float* m, float* v, float* master, size_t n, double factor, double lr, double beta1,
           double beta2, double eps, double weight_decay, int64_t step, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`.
namespace cuda {

template <typename T>
void adamw(T* param, T* grad, float* m, float* v, float* master, size_t n, double factor, double lr, double beta1,
           double beta2, double eps, double weight_decay, int64_t step, CudaStream stream);

}  // namespace cuda
}  // namespace mpipipe
