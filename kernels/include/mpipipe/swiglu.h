// The gate of SwiGLU (Shazeer: "GLU variants improve transformer", 2020): y = gate * sigmoid(gate) * up.
//
// Contract: y, dy, dgate and dup are contiguous, (rows, d); rows of gate and up begin every gate_stride and up_stride
// elements, so that both may be halves of one matrix. T is float or bf16; everything is computed in float32. No pointer
// that is written may overlap another one. rows or d may be 0. NaN stays NaN. The bits do not depend on `threads`.
#pragma once

#include <cstddef>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {
namespace reference {

template <typename T>
void swiglu(const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* y, size_t rows, size_t d, int threads);
template <typename T>
void swiglu_backward(const T* dy, const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* dgate, T* dup,
                     size_t rows, size_t d, int threads);

}  // namespace reference

namespace cpu {

template <typename T>
void swiglu(const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* y, size_t rows, size_t d, int threads);

// dgate and dup from dy; the sigmoid is computed again.
template <typename T>
void swiglu_backward(const T* dy, const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* dgate, T* dup,
                     size_t rows, size_t d, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`.
namespace cuda {

template <typename T>
void swiglu(const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* y, size_t rows, size_t d,
            CudaStream stream);
template <typename T>
void swiglu_backward(const T* dy, const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* dgate, T* dup,
                     size_t rows, size_t d, CudaStream stream);

}  // namespace cuda
}  // namespace mpipipe
