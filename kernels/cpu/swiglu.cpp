// One pass over gate and up, forward and backward.
#include "mpipipe/swiglu.h"

#include "mpipipe/math.h"
#include "mpipipe/partial.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {

template <typename T>
void swiglu(const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* y, size_t rows, size_t d,
            int threads) {
    parallel_pieces(rows, rows_of_piece(d), threads, [&](size_t first, size_t last) {
        for (size_t r = first; r < last; ++r) {
            const T *const gates = gate + r * gate_stride, *const ups = up + r * up_stride;
            T* __restrict const to = y + r * d;
#pragma omp simd
            for (size_t i = 0; i < d; ++i) {
                const float g = wide(gates[i]);
                to[i] = narrow<T>(g * sigmoid(g) * wide(ups[i]));
            }
        }
    });
}

template <typename T>
void swiglu_backward(const T* dy, const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* dgate, T* dup,
                     size_t rows, size_t d, int threads) {
    parallel_pieces(rows, rows_of_piece(d), threads, [&](size_t first, size_t last) {
        for (size_t r = first; r < last; ++r) {
            const T *const gates = gate + r * gate_stride, *const ups = up + r * up_stride, *const dys = dy + r * d;
            T *__restrict const dgates = dgate + r * d, *__restrict const dups = dup + r * d;
#pragma omp simd
            for (size_t i = 0; i < d; ++i) {
                const float g = wide(gates[i]), dyi = wide(dys[i]), s = sigmoid(g);
                dups[i] = narrow<T>(dyi * (g * s));
                dgates[i] = narrow<T>(dyi * wide(ups[i]) * (s * (1.0f + g * (1.0f - s))));
            }
        }
    });
}

#define MPIPIPE_INSTANTIATE(T)                                                                    \
    template void swiglu(const T*, size_t, const T*, size_t, T*, size_t, size_t, int);            \
    template void swiglu_backward(const T*, const T*, size_t, const T*, size_t, T*, T*, size_t, size_t, int);
MPIPIPE_INSTANTIATE(float)
MPIPIPE_INSTANTIATE(bf16)
#undef MPIPIPE_INSTANTIATE

}  // namespace mpipipe::cpu
