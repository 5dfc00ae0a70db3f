// One pass over x, forward and backward.
#include "mpipipe/bias_gelu.h"

#include <vector>

#include "mpipipe/gelu.h"
#include "mpipipe/partial.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

// The bias (d,), or zeros. In float32: it is widened once, not again for each row.
template <typename B>
std::vector<float> widened(const B* bias, size_t d) {
    std::vector<float> b(d);
    for (size_t i = 0; bias && i < d; ++i) b[i] = wide(bias[i]);
    return b;
}

template <typename Gelu, typename T>
[[gnu::noinline]] void gelu_row(const T* __restrict x, const float* __restrict bias, T* __restrict y, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) y[i] = narrow<T>(Gelu::template value<T>(wide(x[i]) + bias[i]));
}

// Adds the row of dx to `sum`, whose total becomes a B, as well.
template <typename Gelu, typename T, typename B>
[[gnu::noinline]] void gelu_gradient(const T* __restrict dy, const T* __restrict x, const float* __restrict bias,
                                    T* __restrict dx, float* __restrict sum, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) {
        const float gradient = wide(dy[i]) * Gelu::template derivative<B>(wide(x[i]) + bias[i]);
        dx[i] = narrow<T>(gradient);
        sum[i] += gradient;
    }
}

template <typename Gelu, typename T>
void forward(const T* x, const float* bias, T* y, size_t rows, size_t d, int threads) {
    parallel_pieces(rows, rows_of_piece(d), threads, [&](size_t first, size_t last) {
        for (size_t r = first; r < last; ++r) gelu_row<Gelu>(x + r * d, bias, y + r * d, d);
    });
}

template <typename Gelu, typename T, typename B>
void backward(const T* dy, const T* x, const float* bias, T* dx, B* dbias, size_t rows, size_t d, int threads) {
    const ColumnSums sums(rows, d);
    parallel_pieces(rows, sums.piece, threads, [&](size_t from, size_t to) {
        sums.blocks(from, to, [&](size_t first, size_t last, float* sum) {
            for (size_t r = first; r < last; ++r)
                gelu_gradient<Gelu, T, B>(dy + r * d, x + r * d, bias, dx + r * d, sum, d);
        });
    });
    sums.total(dbias, threads, d, 0);
}

}  // namespace

template <typename T, typename B>
void bias_gelu(const T* x, const B* bias, bool tanh, T* y, size_t rows, size_t d, int threads) {
    (tanh ? forward<Tanh, T> : forward<Exact, T>)(x, widened(bias, d).data(), y, rows, d, threads);
}

template <typename T, typename B>
void bias_gelu_backward(const T* dy, const T* x, const B* bias, bool tanh, T* dx, B* dbias, size_t rows, size_t d,
                        int threads) {
    const auto kernel = tanh ? backward<Tanh, T, B> : backward<Exact, T, B>;
    kernel(dy, x, widened(bias, d).data(), dx, dbias, rows, d, threads);
}

template decltype(bias_gelu<float, float>) bias_gelu<float, float>;
template decltype(bias_gelu<bf16, bf16>) bias_gelu<bf16, bf16>;
template decltype(bias_gelu<bf16, float>) bias_gelu<bf16, float>;
template decltype(bias_gelu_backward<float, float>) bias_gelu_backward<float, float>;
template decltype(bias_gelu_backward<bf16, bf16>) bias_gelu_backward<bf16, bf16>;
template decltype(bias_gelu_backward<bf16, float>) bias_gelu_backward<bf16, float>;

}  // namespace mpipipe::cpu
