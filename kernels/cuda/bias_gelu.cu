#include "mpipipe/bias_gelu.h"

#include "columns.cuh"
#include "mpipipe/gelu.h"

namespace mpipipe::cuda {
namespace {

template <typename T, typename B>
struct Biased {
    const T* x;
    const B* bias;  // or null
    size_t d;
    __device__ float operator()(size_t r, size_t i) const { return wide(x[r * d + i]) + (bias ? wide(bias[i]) : 0.0f); }
};

template <typename Gelu, typename T, typename B>
__global__ void forward(Biased<T, B> h, T* y, size_t rows, size_t d) {
    for (size_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (size_t i = threadIdx.x; i < d; i += kThreads) y[r * d + i] = narrow<T>(Gelu::template value<T>(h(r, i)));
}

// The gradient of an element, written to dx on its way into the sum.
template <typename Gelu, typename T, typename B>
struct Gradient {
    Biased<T, B> h;
    const T* dy;
    T* dx;
    __device__ float operator()(size_t r, size_t i) const {
        const float gradient = wide(dy[r * h.d + i]) * Gelu::template derivative<B>(h(r, i));
        dx[r * h.d + i] = narrow<T>(gradient);
        return gradient;
    }
};

}  // namespace

template <typename T, typename B>
void bias_gelu(const T* x, const B* bias, bool tanh, T* y, size_t rows, size_t d, CudaStream stream) {
    const auto kernel = tanh ? forward<Tanh, T, B> : forward<Exact, T, B>;
    launch(kernel, dim3(blocks(rows)), stream, Biased<T, B>{x, bias, d}, y, rows, d);
}

template <typename T, typename B>
void bias_gelu_backward(const T* dy, const T* x, const B* bias, bool tanh, T* dx, B* dbias, size_t rows, size_t d,
                        CudaStream stream) {
    const Biased<T, B> h{x, bias, d};
    if (tanh)
        sum_rows(Gradient<Tanh, T, B>{h, dy, dx}, rows, d, dbias, stream);
    else
        sum_rows(Gradient<Exact, T, B>{h, dy, dx}, rows, d, dbias, stream);
}

template decltype(bias_gelu<float, float>) bias_gelu<float, float>;
template decltype(bias_gelu<bf16, bf16>) bias_gelu<bf16, bf16>;
template decltype(bias_gelu<bf16, float>) bias_gelu<bf16, float>;
template decltype(bias_gelu_backward<float, float>) bias_gelu_backward<float, float>;
template decltype(bias_gelu_backward<bf16, bf16>) bias_gelu_backward<bf16, bf16>;
template decltype(bias_gelu_backward<bf16, float>) bias_gelu_backward<bf16, float>;

}  // namespace mpipipe::cuda
