// One row after the other, in blocks that stay in the first-level cache: the largest logit, then the sum.
#include "mpipipe/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "mpipipe/math.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kBlock = 1024;  // columns whose sum is made in float32
constexpr size_t kLanes = 16;    // running maxima and sums side by side; the widest vector of float32
constexpr size_t kRows = 4;      // of a piece of work

constexpr float kInfinity = __builtin_inff();

// `lanes` partial results of f over block[0, n), lane i % kLanes in the order of i; the same on every vector width.
template <typename Step>
void by_lanes(const float* block, size_t n, float (&lanes)[kLanes], Step step) {
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (size_t j = 0; j < kLanes; ++j) lanes[j] = step(lanes[j], block[i + j]);
    }
    for (size_t j = 0; i + j < n; ++j) lanes[j] = step(lanes[j], block[i + j]);
}

double total(const float (&lanes)[kLanes]) {
    double sum = 0;
    for (float lane : lanes) sum += lane;
    return sum;
}

// block = logits + bias, in float32
template <typename T>
void load(const T* logits, const float* bias, size_t n, float* block) {
    if (bias) {
#pragma omp simd
        for (size_t i = 0; i < n; ++i) block[i] = wide(logits[i]) + bias[i];
    } else {
#pragma omp simd
        for (size_t i = 0; i < n; ++i) block[i] = wide(logits[i]);
    }
}

void add_block(const float* block, size_t n, double* state) {
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, -kInfinity);
    by_lanes(block, n, lanes, [](float most, float x) { return x > most ? x : most; });
    const float before = static_cast<float>(state[0]);
    const float most = std::max(before, *std::max_element(lanes, lanes + kLanes));
    // all -infinity so far: their difference would be NaN, their probability is 0
    const float shift = most == -kInfinity ? 0.0f : most;
    if (most > before) state[1] *= std::exp(static_cast<double>(before) - most);
    state[0] = most;

    std::fill_n(lanes, kLanes, 0.0f);
    by_lanes(block, n, lanes, [shift](float sum, float x) { return sum + exp_(x - shift); });
    state[1] += total(lanes);
    std::fill_n(lanes, kLanes, 0.0f);
    by_lanes(block, n, lanes, [](float sum, float x) { return sum + x; });
    state[3] += total(lanes);
}

}  // namespace

template <typename T>
void cross_entropy_forward(const T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                           int64_t first, int64_t ignored, double* state, int threads) {
    parallel_pieces(rows, kRows, threads, [=](size_t from, size_t to) {
        alignas(64) float block[kBlock];
        for (size_t r = from; r < to; ++r) {
            if (labels[r] == ignored) continue;
            for (size_t c = 0; c < columns; c += kBlock) {
                const size_t n = std::min(kBlock, columns - c);
                load(logits + r * columns + c, bias ? bias + c : nullptr, n, block);
                add_block(block, n, state + 4 * r);
                const int64_t at = labels[r] - first - static_cast<int64_t>(c);
                if (at >= 0 && at < static_cast<int64_t>(n)) state[4 * r + 2] = block[at];
            }
        }
    });
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
                load(row + c, bias ? bias + c : nullptr, n, block);
#pragma omp simd
                for (size_t i = 0; i < n; ++i) block[i] = (exp_(block[i] - shift) - on_all) * scale;
                const int64_t at = labels[r] - first - static_cast<int64_t>(c);
                if (at >= 0 && at < static_cast<int64_t>(n)) block[at] -= on_label * scale;
#pragma omp simd
                for (size_t i = 0; i < n; ++i) row[c + i] = narrow<T>(block[i]);
            }
        }
    });
}

template void cross_entropy_forward<float>(const float*, size_t, size_t, const float*, const int64_t*, int64_t,
                                           int64_t, double*, int);
template void cross_entropy_forward<bf16>(const bf16*, size_t, size_t, const float*, const int64_t*, int64_t,
                                          int64_t, double*, int);
template void cross_entropy_backward<float>(float*, size_t, size_t, const float*, const int64_t*, int64_t, int64_t,
                                            const float*, float, float, float, int);
template void cross_entropy_backward<bf16>(bf16*, size_t, size_t, const float*, const int64_t*, int64_t, int64_t,
                                           const float*, float, float, float, int);

}  // namespace mpipipe::cpu
