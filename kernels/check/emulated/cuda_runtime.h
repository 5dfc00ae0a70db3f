// As much of CUDA as kernels/cuda uses, on the processor: the checker runs the kernels where there is no GPU.
//
// Blocks run one after the other. The threads of a block are fibers; one runs until it waits for others, then
// another one does, in an order that changes each time: where a barrier is missing, some order gives other results.
// It does not show what only the hardware does: memory errors between blocks, speed, the rounding of its functions.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __shared__ static  // blocks run one at a time

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

namespace emulated {

// Returns when all threads of the block, or of the warp, have come here.
void wait_for_block();
void wait_for_warp();

// `kernel` on every thread of every block. Ends the program where some threads wait and others never come.
void run(dim3 blocks, dim3 threads, const std::function<void()>& kernel);

// What `lane` of this thread's warp gave.
uint64_t exchange(uint64_t given, unsigned lane);
unsigned lane();

}  // namespace emulated

extern dim3 threadIdx, blockIdx, gridDim;  // of the thread that runs

inline void __syncthreads() { emulated::wait_for_block(); }
inline void __syncwarp() { emulated::wait_for_warp(); }

template <typename T>
T __shfl_xor_sync(unsigned, T x, unsigned mask) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    bits = emulated::exchange(bits, emulated::lane() ^ mask);
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline bool __any_sync(unsigned all, bool x) {
    unsigned any = x;
    for (unsigned step = 16; step; step /= 2) any |= __shfl_xor_sync(all, any, step);
    return any;
}

using cudaError_t = int;
using cudaStream_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "out of memory"; }
inline cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return !(*p = std::malloc(bytes)); }
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return std::free(p), cudaSuccess; }

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments... given) {
    emulated::run(config->gridDim, config->blockDim, [=] { kernel(given...); });
    return cudaSuccess;
}
