#include "mpipipe/swiglu.h"

#include "launch.cuh"
#include "mpipipe/math.h"

namespace mpipipe::cuda {
namespace {

template <typename T>
__global__ void forward(const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* y, size_t rows, size_t d) {
    for (size_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (size_t i = threadIdx.x; i < d; i += kThreads) {
            const float g = wide(gate[r * gate_stride + i]);
            y[r * d + i] = narrow<T>(g * sigmoid(g) * wide(up[r * up_stride + i]));
        }
}

template <typename T>
__global__ void backward(const T* dy, const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* dgate,
                         T* dup, size_t rows, size_t d) {
    for (size_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (size_t i = threadIdx.x; i < d; i += kThreads) {
            const float g = wide(gate[r * gate_stride + i]), dyi = wide(dy[r * d + i]), s = sigmoid(g);
            dup[r * d + i] = narrow<T>(dyi * (g * s));
            dgate[r * d + i] = narrow<T>(dyi * wide(up[r * up_stride + i]) * (s * (1.0f + g * (1.0f - s))));
        }
}

}  // namespace

template <typename T>
void swiglu(const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* y, size_t rows, size_t d,
            CudaStream stream) {
    launch(forward<T>, dim3(blocks(rows)), stream, gate, gate_stride, up, up_stride, y, rows, d);
}

template <typename T>
void swiglu_backward(const T* dy, const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* dgate, T* dup,
                     size_t rows, size_t d, CudaStream stream) {
    launch(backward<T>, dim3(blocks(rows)), stream, dy, gate, gate_stride, up, up_stride, dgate, dup, rows, d);
}

template decltype(swiglu<float>) swiglu<float>;
template decltype(swiglu<bf16>) swiglu<bf16>;
template decltype(swiglu_backward<float>) swiglu_backward<float>;
template decltype(swiglu_backward<bf16>) swiglu_backward<bf16>;

}  // namespace mpipipe::cuda
