// One pass over x, forward and backward.
#include "mpipipe/bias_gelu.h"

#include "mpipipe/gelu.h"
#include "mpipipe/or_constant.h"
#include "mpipipe/partial.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

template <typename Gelu, typename T, typename B>
[[gnu::noinline]] void gelu_row(const T* __restrict x, const B* __restrict bias, T* __restrict y, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) y[i] = narrow<T>(Gelu::value(wide(x[i]) + wide(bias[i])));
}

// Adds the row of dx to `sum` as well.
template <typename Gelu, typename T, typename B>
[[gnu::noinline]] void gelu_gradient(const T* __restrict dy, const T* __restrict x, const B* __restrict bias,
                                    T* __restrict dx, float* __restrict sum, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) {
        const float gradient = wide(dy[i]) * Gelu::derivative(wide(x[i]) + wide(bias[i]));
        dx[i] = narrow<T>(gradient);
        sum[i] += gradient;
    }
}

template <typename Gelu, typename T, typename B>
void forward(const T* x, const B* bias, T* y, size_t rows, size_t d, int threads) {
    parallel_pieces(rows, rows_of_piece(d), threads, [&](size_t first, size_t last) {
        for (size_t r = first; r < last; ++r) gelu_row<Gelu>(x + r * d, bias, y + r * d, d);
    });
}

template <typename Gelu, typename T, typename B>
void backward(const T* dy, const T* x, const B* bias, T* dx, B* dbias, size_t rows, size_t d, int threads) {
    const ColumnSums sums(rows, d);
    parallel_pieces(rows, sums.piece, threads, [&](size_t from, size_t to) {
        sums.blocks(from, to, [&](size_t first, size_t last, float* sum) {
            for (size_t r = first; r < last; ++r)
                gelu_gradient<Gelu>(dy + r * d, x + r * d, bias, dx + r * d, sum, d);
        });
    });
    sums.total(dbias, threads, d, 0);
}

}  // namespace

template <typename T, typename B>
void bias_gelu(const T* x, const B* bias, bool tanh, T* y, size_t rows, size_t d, int threads) {
    const OrConstant<B> b(bias, 0, d);
    (tanh ? forward<Tanh, T, B> : forward<Exact, T, B>)(x, b.p, y, rows, d, threads);
}

template <typename T, typename B>
void bias_gelu_backward(const T* dy, const T* x, const B* bias, bool tanh, T* dx, B* dbias, size_t rows, size_t d,
                        int threads) {
    const OrConstant<B> b(bias, 0, d);
    (tanh ? backward<Tanh, T, B> : backward<Exact, T, B>)(dy, x, b.p, dx, dbias, rows, d, threads);
}

template decltype(bias_gelu<float, float>) bias_gelu<float, float>;
template decltype(bias_gelu<bf16, bf16>) bias_gelu<bf16, bf16>;
template decltype(bias_gelu<bf16, float>) bias_gelu<bf16, float>;
template decltype(bias_gelu_backward<float, float>) bias_gelu_backward<float, float>;
template decltype(bias_gelu_backward<bf16, bf16>) bias_gelu_backward<bf16, bf16>;
template decltype(bias_gelu_backward<bf16, float>) bias_gelu_backward<bf16, float>;

}  // namespace mpipipe::cpu
