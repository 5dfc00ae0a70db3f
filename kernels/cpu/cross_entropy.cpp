// One row after the other, in blocks that stay in the first-level cache: the largest logit, then the sum. The loss is
// made of four numbers for each row, by one thread: others would take longer to begin.
#include "mpipipe/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "mpipipe/math.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kBlock = 1024;  // columns whose sums are made in float32
constexpr size_t kRows = 4;      // of a piece of work

constexpr float kInfinity = __builtin_inff();

// n logits with their bias in float32: in `block`, or where they are if they need no change.
template <typename T>
const float* with_bias(const T* logits, const float* bias, size_t n, float* block) {
    if (bias) {
#pragma omp simd
        for (size_t i = 0; i < n; ++i) block[i] = wide(logits[i]) + bias[i];
        return block;
    }
    if constexpr (std::is_same_v<T, float>) return logits;
#pragma omp simd
    for (size_t i = 0; i < n; ++i) block[i] = wide(logits[i]);
    return block;
}

void add_block(const float* x, size_t n, double* state) {
    float most = -kInfinity, total = 0;
#pragma omp simd reduction(max : most) reduction(+ : total)
    for (size_t i = 0; i < n; ++i) {
        most = x[i] > most ? x[i] : most;
        total += x[i];
    }
    const float before = static_cast<float>(state[0]);
    most = most > before ? most : before;
    // all -infinity so far: their difference would be NaN, their probability is 0
    const float shift = most == -kInfinity ? 0.0f : most;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; ++i) sum += exp_(x[i] - shift);
    if (most > before) state[1] *= std::exp(static_cast<double>(before) - most);
    state[0] = most;
    state[1] += sum;
    state[3] += total;
}

}  // namespace

template <typename T>
void cross_entropy_forward(const T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                           int64_t first, int64_t ignored, double* state, int threads) {
    parallel_pieces(rows, kRows, threads, [=](size_t from, size_t to) {
        alignas(64) float block[kBlock];
        for (size_t r = from; r < to; ++r) {
            if (labels[r] == ignored) continue;
            double* const of_row = state + 4 * r;
            if (first == 0) {
                of_row[0] = -kInfinity;
                of_row[1] = of_row[2] = of_row[3] = 0;
            }
            for (size_t c = 0; c < columns; c += kBlock) {
                const size_t n = std::min(kBlock, columns - c);
                const float* x = with_bias(logits + r * columns + c, bias ? bias + c : nullptr, n, block);
                add_block(x, n, of_row);
                if (const size_t i = column(labels[r], first) - c; i < n) of_row[2] = x[i];
            }
        }
    });
}

bool cross_entropy_loss(const double* state, size_t rows, const int64_t* labels, int64_t entries, int64_t ignored,
                        double smoothing, float* log_sum, float* loss, int) {
    const double on_label = 1.0 - smoothing, on_all = smoothing / static_cast<double>(entries);
    double total = 0;
    bool inside = true;
    for (size_t r = 0; r < rows; ++r) {
        float of_row = 0;
        if (labels[r] != ignored) {
            const double* const s = state + 4 * r;
            const double sum = s[0] + std::log(s[1]), row = sum - on_label * s[2];
            // the sum of the logits may be infinite where nothing asks for it
            total += smoothing != 0.0 ? row - on_all * s[3] : row;
            of_row = static_cast<float>(sum);
            inside = inside && labels[r] >= 0 && labels[r] < entries;
        }
        log_sum[r] = of_row;
    }
    *loss = static_cast<float>(total);
    return inside;
}

template <typename T>
void cross_entropy_backward(T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                            int64_t first, int64_t ignored, const float* log_sum, float on_label, float on_all,
                            float scale, int threads) {
    parallel_pieces(rows, kRows, threads, [=](size_t from, size_t to) {
        alignas(64) float block[kBlock];
        for (size_t r = from; r < to; ++r) {
            T* row = logits + r * columns;
            if (labels[r] == ignored) {
                std::fill_n(row, columns, T{});
                continue;
            }
            const float shift = log_sum[r];
            for (size_t c = 0; c < columns; c += kBlock) {
                const size_t n = std::min(kBlock, columns - c);
                const float* x = with_bias(row + c, bias ? bias + c : nullptr, n, block);
#pragma omp simd
                for (size_t i = 0; i < n; ++i) block[i] = (exp_(x[i] - shift) - on_all) * scale;
                if (const size_t i = column(labels[r], first) - c; i < n) block[i] -= on_label * scale;
#pragma omp simd
                for (size_t i = 0; i < n; ++i) row[c + i] = narrow<T>(block[i]);
            }
        }
    });
}

template decltype(cross_entropy_forward<float>) cross_entropy_forward<float>;
template decltype(cross_entropy_forward<bf16>) cross_entropy_forward<bf16>;
template decltype(cross_entropy_backward<float>) cross_entropy_backward<float>;
template decltype(cross_entropy_backward<bf16>) cross_entropy_backward<bf16>;

}  // namespace mpipipe::cpu
