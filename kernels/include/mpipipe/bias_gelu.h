// GELU (Hendrycks, Gimpel: "Gaussian error linear units", 2016) of the rows of a matrix, with a bias added before it.
//
//     h = x + bias
//     y = h * P(X <= h)                                                   X normal with mean 0 and variance 1
//     y = h / 2 * (1 + tanh(sqrt(2 / pi) * (h + 0.044715 h^3)))           `tanh`: the approximation of the paper
//
// Contract: matrices are contiguous, (rows, d). T, the type of the matrices, is float or bf16; B, that of bias and
// dbias (d,), is T or float. Everything is computed in float32; h is never rounded to T. No pointer that is written may
// overlap another one. rows or d may be 0. Null: bias (zeros) and dbias (not wanted). NaN stays NaN. The bits do not
// depend on `threads`.
#pragma once

#include <cstddef>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {
namespace reference {

template <typename T, typename B>
void bias_gelu(const T* x, const B* bias, bool tanh, T* y, size_t rows, size_t d, int threads);
template <typename T, typename B>
void bias_gelu_backward(const T* dy, const T* x, const B* bias, bool tanh, T* dx, B* dbias, size_t rows, size_t d,
                        int threads);

}  // namespace reference

namespace cpu {

template <typename T, typename B>
void bias_gelu(const T* x, const B* bias, bool tanh, T* y, size_t rows, size_t d, int threads);

// dx = dy * the derivative of y by h, which is computed again from x; dbias = its sum over rows.
template <typename T, typename B>
void bias_gelu_backward(const T* dy, const T* x, const B* bias, bool tanh, T* dx, B* dbias, size_t rows, size_t d,
                        int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`.
namespace cuda {

template <typename T, typename B>
void bias_gelu(const T* x, const B* bias, bool tanh, T* y, size_t rows, size_t d, CudaStream stream);
template <typename T, typename B>
void bias_gelu_backward(const T* dy, const T* x, const B* bias, bool tanh, T* dx, B* dbias, size_t rows, size_t d,
                        CudaStream stream);

}  // namespace cuda
}  // namespace mpipipe
