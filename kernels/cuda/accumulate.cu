#include "mpipipe/accumulate.h"

#include "launch.cuh"

namespace mpipipe::cuda {
namespace {

__global__ void add(float* sum, bf16* x, size_t n, bool zero) {
    for (size_t i = thread(); i < n; i += threads()) {
        sum[i] += wide(x[i]);
        if (zero) x[i] = bf16{};
    }
}

}  // namespace

void accumulate(float* sum, bf16* x, size_t n, bool zero, CudaStream stream) {
    launch(add, dim3(blocks_of_threads(n)), stream, sum, x, n, zero);
}

}  // namespace mpipipe::cuda
