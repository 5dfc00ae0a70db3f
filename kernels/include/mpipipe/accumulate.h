// Gradients in bfloat16 added to a sum in float32: sum[i] += x[i], and x[i] = 0 where `zero`. The bits of torch's sum.
//
// Contract: `n` elements, the buffers do not overlap; no alignment asked, no allocation, no exception, any n including
// 0. NaN and infinity pass.
#pragma once

#include <cstddef>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {

namespace reference {

void accumulate(float* sum, bf16* x, size_t n, bool zero, int threads);

}  // namespace reference

namespace cpu {

void accumulate(float* sum, bf16* x, size_t n, bool zero, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`.
namespace cuda {

void accumulate(float* sum, bf16* x, size_t n, bool zero, CudaStream stream);

}  // namespace cuda
}  // namespace mpipipe
