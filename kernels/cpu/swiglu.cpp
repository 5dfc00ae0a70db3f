// One pass over gate and up, forward and backward.
#include "mpipipe/swiglu.h"

#include "mpipipe/math.h"
#include "mpipipe/partial.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

template <typename T>
[[gnu::noinline]] void swiglu_row(const T* __restrict gate, const T* __restrict up, T* __restrict y, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) {
        const float g = wide(gate[i]);
        y[i] = narrow<T>(g * sigmoid(g) * wide(up[i]));
    }
}

template <typename T>
[[gnu::noinline]] void swiglu_gradient(const T* __restrict dy, const T* __restrict gate, const T* __restrict up,
                                    T* __restrict dgate, T* __restrict dup, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) {
        const float g = wide(gate[i]), dyi = wide(dy[i]), s = sigmoid(g);
        dup[i] = narrow<T>(dyi * (g * s));
        dgate[i] = narrow<T>(dyi * wide(up[i]) * (s * (1.0f + g * (1.0f - s))));
    }
}

}  // namespace

template <typename T>
void swiglu(const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* y, size_t rows, size_t d,
            int threads) {
    parallel_pieces(rows, rows_of_piece(d), threads, [&](size_t first, size_t last) {
        for (size_t r = first; r < last; ++r)
            swiglu_row(gate + r * gate_stride, up + r * up_stride, y + r * d, d);
    });
}

template <typename T>
void swiglu_backward(const T* dy, const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* dgate, T* dup,
                     size_t rows, size_t d, int threads) {
    parallel_pieces(rows, rows_of_piece(d), threads, [&](size_t first, size_t last) {
        for (size_t r = first; r < last; ++r)
            swiglu_gradient(dy + r * d, gate + r * gate_stride, up + r * up_stride, dgate + r * d, dup + r * d, d);
    });
}

template decltype(swiglu<float>) swiglu<float>;
template decltype(swiglu<bf16>) swiglu<bf16>;
template decltype(swiglu_backward<float>) swiglu_backward<float>;
template decltype(swiglu_backward<bf16>) swiglu_backward<bf16>;

}  // namespace mpipipe::cpu
