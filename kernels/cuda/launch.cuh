// How kernels are started, what a thread works on, and sums over a block's threads.
//
// Every kernel is correct for any number of blocks: it goes through its rows or elements in strides of the grid.
// Results do not depend on that number: no atomics, and the order of every sum follows from sizes alone.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "check.h"
#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe::cuda {

constexpr unsigned kThreads = 256;  // of a block
constexpr unsigned kWarp = 32;
constexpr size_t kMostBlocks = 1 << 16;  // more only queue up
constexpr size_t kMostY = 65535;  // blocks along y, of CUDA

// Nothing is started where there is nothing to do.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, CudaStream stream, Arguments... arguments) {
    if (blocks.x == 0 || blocks.y == 0) return;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "start of a kernel");
}

// Blocks for n items of work with a block each.
inline unsigned blocks(size_t n) { return static_cast<unsigned>(std::min(n, kMostBlocks)); }
// Blocks for n items with a thread each.
inline unsigned blocks_of_threads(size_t n) { return blocks((n + kThreads - 1) / kThreads); }

// This thread of all that lie along x, and their number.
__device__ inline size_t thread() { return size_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ inline size_t threads() { return size_t{gridDim.x} * kThreads; }

struct Sum {
    template <typename N>
    __device__ N operator()(N a, N b) const {
        return a + b;
    }
};
struct Largest {  // of two numbers; a NaN is no number
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// x of all lanes of the warp combined, on each of them.
template <typename Combine, typename N>
__device__ N over_warp(N x) {
    for (unsigned step = kWarp / 2; step; step /= 2) x = Combine()(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// x of all threads of the block combined, on each of them. All threads of the block must come here.
template <typename Combine, typename N>
__device__ N over_block(N x) {
    __shared__ N of_warp[kThreads / kWarp];
    x = over_warp<Combine>(x);
    __syncthreads();  // an earlier call may still be read
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
    __syncthreads();
    N all = of_warp[0];
    for (unsigned w = 1; w < kThreads / kWarp; ++w) all = Combine()(all, of_warp[w]);
    return all;
}

// Memory of the GPU that is there between what comes before and after it in the order of `stream`.
template <typename T>
class Workspace {
  public:
    Workspace(size_t n, CudaStream stream) : stream_(stream) {
        void* p = nullptr;
        check(cudaMallocAsync(&p, std::max<size_t>(n, 1) * sizeof(T), stream), "memory for partial sums");
        this->p = static_cast<T*>(p);
    }
    Workspace(const Workspace&) = delete;
    ~Workspace() { cudaFreeAsync(p, stream_); }

    T* p;

  private:
    CudaStream stream_;
};

}  // namespace mpipipe::cuda
