// Row by row: a row stays in the first-level cache over the few passes that a norm makes over it, so memory sees
// each tensor once. Of these passes some read or write memory and others do not; the last one of a row and the first
// one of the next are made together, so that memory has more to do at a time. Bits are the same with and without a
// residual, and in whichever pass a number is made.
#include "mpipipe/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "mpipipe/or_constant.h"
#include "mpipipe/partial.h"
#include "mpipipe/run_sum.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kRun = 4096;  // elements summed in float32 before the sum goes on in double

template <typename T, typename R>
inline T added(T x, R residual) {
    return narrow<T>(wide(x) + wide(residual));
}

template <typename T>
inline T scaled(T s, T weight, T bias, float mean, float rstd) {
    return narrow<T>((wide(s) - mean) * rstd * wide(weight) + wide(bias));
}

// s = x + residual, rounded.
template <typename T, typename R>
[[gnu::noinline]] void add_row(const T* __restrict x, const R* __restrict residual, T* __restrict s, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) s[i] = added(x[i], residual[i]);
}

template <bool squares, typename T>
double row_sum(const T* s, float mean, size_t d) {
    double sum = 0;  // over runs: long rows lose no digits
    for (size_t at = 0; at < d; at += kRun) sum += run_sum<squares>(s + at, mean, std::min(kRun, d - at));
    return sum;
}

template <typename T>
[[gnu::noinline]] void scale_row(const T* __restrict s, const T* __restrict weight, const T* __restrict bias,
                                 float mean, float rstd, T* __restrict y, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) y[i] = scaled(s[i], weight[i], bias[i], mean, rstd);
}

// Both: of one row, and of the row behind it.
template <typename T, typename R>
[[gnu::noinline]] void scale_and_add(const T* __restrict s, const T* __restrict weight, const T* __restrict bias,
                                     float mean, float rstd, T* __restrict y, const T* __restrict next,
                                     const R* __restrict residual, T* __restrict next_s, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) {
        y[i] = scaled(s[i], weight[i], bias[i], mean, rstd);
        next_s[i] = added(next[i], residual[i]);
    }
}

// RMS norm is layer norm with the mean taken as 0: `mean` is null.
template <typename T, typename R>
void forward(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y, float* mean,
             float* rstd, size_t rows, size_t d, int threads) {
    const OrConstant<T> w(weight, 1, d), b(bias, 0, d);
    parallel_pieces(rows, rows_of_piece(d), threads, [&](size_t first, size_t last) {
        if (residual) add_row(x + first * d, residual + first * d, s + first * d, d);
        for (size_t r = first; r < last; ++r) {
            const size_t at = r * d, next = at + d;
            const T* row = (residual ? s : x) + at;
            const float centre = mean ? static_cast<float>(row_sum<false>(row, 0, d) / d) : 0.0f;
            const float scaling = static_cast<float>(1 / std::sqrt(row_sum<true>(row, centre, d) / d + eps));
            if (mean) mean[r] = centre;
            rstd[r] = scaling;
            if (residual && r + 1 < last)
                scale_and_add(row, w.p, b.p, centre, scaling, y + at, x + next, residual + next, s + next, d);
            else
                scale_row(row, w.p, b.p, centre, scaling, y + at, d);
        }
    });
}

// What the gradient of a row needs of the whole row, with g = dy * weight.
struct RowSums {
    double g, gh;
};

// Adds the row to the sums of dy * h and dy over rows as well.
template <bool centred, typename T>
[[gnu::noinline]] void run_sums(const T* __restrict dy, const T* __restrict s, const T* __restrict weight, float mean,
                                float rstd, float* __restrict dweight, float* __restrict dbias, size_t n,
                                RowSums& sums) {
    float sum_g = 0, sum_gh = 0;
#pragma omp simd reduction(+ : sum_g, sum_gh)
    for (size_t i = 0; i < n; ++i) {
        const float h = (wide(s[i]) - mean) * rstd, dyi = wide(dy[i]), g = dyi * wide(weight[i]);
        dweight[i] += dyi * h;
        sum_gh += g * h;
        if (centred) {
            dbias[i] += dyi;
            sum_g += g;
        }
    }
    sums.g += sum_g;
    sums.gh += sum_gh;
}

template <bool centred, typename T>
RowSums row_sums(const T* dy, const T* s, const T* weight, float mean, float rstd, float* sum, size_t d) {
    RowSums sums{0, 0};
    for (size_t at = 0; at < d; at += kRun)
        run_sums<centred>(dy + at, s + at, weight + at, mean, rstd, sum + at, sum + d + at, std::min(kRun, d - at),
                          sums);
    return sums;
}

// dx = rstd * (g - mean(g) - h * mean(g * h)), its last step a subtraction: with `ds` to add, a compiler that fuses
// multiplications with additions has none left, and the bits are those of an addition made later.
template <bool add_ds, typename T>
[[gnu::noinline]] void row_gradient(const T* __restrict dy, const T* __restrict ds, const T* __restrict s,
                                    const T* __restrict weight, float mean, float rstd, float mean_g, float mean_gh,
                                    T* __restrict dx, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) {
        const float h = (wide(s[i]) - mean) * rstd, g = wide(dy[i]) * wide(weight[i]);
        const T gradient = narrow<T>((rstd * g - mean_g) - h * mean_gh);
        dx[i] = add_ds ? narrow<T>(wide(ds[i]) + wide(gradient)) : gradient;
    }
}

// In a loop of its own, of a row that is in the cache: GCC makes no vectors of one that stores two types.
template <typename T, typename R>
[[gnu::noinline]] void narrow_row(const T* __restrict x, R* __restrict y, size_t d) {
#pragma omp simd
    for (size_t i = 0; i < d; ++i) y[i] = narrow<R>(wide(x[i]));
}

template <bool centred, typename T, typename R>
void backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd, T* dx,
              R* dresidual, T* dweight, T* dbias, size_t rows, size_t d, int threads) {
    const OrConstant<T> w(weight, 1, d);
    const ColumnSums sums(rows, centred ? 2 * d : d);  // of dy * h, and of dy behind it
    parallel_pieces(rows, sums.piece, threads, [&](size_t from, size_t to) {
        sums.blocks(from, to, [&](size_t first, size_t last, float* sum) {
            for (size_t r = first; r < last; ++r) {
                const size_t at = r * d;
                const float centre = centred ? mean[r] : 0.0f, scaling = rstd[r];
                const RowSums row = row_sums<centred>(dy + at, s + at, w.p, centre, scaling, sum, d);
                const float mean_g = static_cast<float>(scaling * row.g / d);
                const float mean_gh = static_cast<float>(scaling * row.gh / d);
                if (ds)
                    row_gradient<true>(dy + at, ds + at, s + at, w.p, centre, scaling, mean_g, mean_gh, dx + at, d);
                else
                    row_gradient<false>(dy + at, ds, s + at, w.p, centre, scaling, mean_g, mean_gh, dx + at, d);
                if (dresidual) narrow_row(dx + at, dresidual + at, d);
            }
        });
    });
    sums.total(dweight, threads, d, 0);
    if (centred) sums.total(dbias, threads, d, d);
}

}  // namespace

template <typename T, typename R>
void layer_norm(const T* x, const R* residual, const T* weight, const T* bias, float eps, T* s, T* y, float* mean,
                float* rstd, size_t rows, size_t d, int threads) {
    forward(x, residual, weight, bias, eps, s, y, mean, rstd, rows, d, threads);
}

template <typename T, typename R>
void layer_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* mean, const float* rstd,
                         T* dx, R* dresidual, T* dweight, T* dbias, size_t rows, size_t d, int threads) {
    backward<true>(dy, ds, s, weight, mean, rstd, dx, dresidual, dweight, dbias, rows, d, threads);
}

template <typename T, typename R>
void rms_norm(const T* x, const R* residual, const T* weight, float eps, T* s, T* y, float* rstd, size_t rows,
              size_t d, int threads) {
    forward<T, R>(x, residual, weight, nullptr, eps, s, y, nullptr, rstd, rows, d, threads);
}

template <typename T, typename R>
void rms_norm_backward(const T* dy, const T* ds, const T* s, const T* weight, const float* rstd, T* dx, R* dresidual,
                       T* dweight, size_t rows, size_t d, int threads) {
    backward<false, T, R>(dy, ds, s, weight, nullptr, rstd, dx, dresidual, dweight, nullptr, rows, d, threads);
}

MPIPIPE_INSTANTIATE_NORM(layer_norm)
MPIPIPE_INSTANTIATE_NORM(layer_norm_backward)
MPIPIPE_INSTANTIATE_NORM(rms_norm)
MPIPIPE_INSTANTIATE_NORM(rms_norm_backward)

}  // namespace mpipipe::cpu
