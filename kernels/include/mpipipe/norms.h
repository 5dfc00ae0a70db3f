// 2-norms of the parameters' gradients, which lie in one flat buffer.
//
//     out[i] = sqrt(sum over k < counts[i] of x[offsets[i] + k]^2)        offsets, counts: elements, `n` of each
//
// Squares of float32 are exact in double, and so is every order of addition here fixed by counts[i] alone: fixed
// pieces, fixed lanes in a piece. The bits of out[i] do not depend on the other parameters, on where the parameter
// lies, on threads or on the instruction set. No square overflows; NaN and infinity pass.
//
// Contract: out overlaps nothing; no alignment asked, counts may be 0. Allocates 8 bytes per 32,768 elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {

namespace reference {

template <typename T>
void norms(const T* x, const int64_t* offsets, const int64_t* counts, size_t n, double* out, int threads);

}  // namespace reference

namespace cpu {

template <typename T>
void norms(const T* x, const int64_t* offsets, const int64_t* counts, size_t n, double* out, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`.
namespace cuda {

template <typename T>
void norms(const T* x, const int64_t* offsets, const int64_t* counts, size_t n, double* out, CudaStream stream);

}  // namespace cuda
}  // namespace mpipipe
