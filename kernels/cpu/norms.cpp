// Each parameter falls into pieces of its own; the pieces of all are shared out to the threads.
#include "mpipipe/norms.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr int64_t kPiece = 1 << 15;  // elements
constexpr int64_t kLanes = 16;       // element k of a piece is added in lane k % kLanes

// bf16 straight to double is not vectorised; float32 needs no copy.
inline const float* widened(const float* x, float*) { return x; }
inline const float* widened(const bf16* x, float* values) {
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) values[j] = wide(x[j]);
    return values;
}

template <typename T>
double sum_of_squares(const T* x, int64_t n) {
    double lane[kLanes] = {};
    const int64_t whole = n / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
        float buffer[kLanes];
        const float* values = widened(x + i, buffer);
#pragma omp simd
        for (int64_t j = 0; j < kLanes; ++j) lane[j] += double{values[j]} * double{values[j]};
    }
    for (int64_t i = whole; i < n; ++i) {
        const double value = wide(x[i]);
        lane[i - whole] += value * value;
    }
    return std::accumulate(lane, lane + kLanes, 0.0);
}

}  // namespace

template <typename T>
void norms(const T* x, const int64_t* offsets, const int64_t* counts, size_t n, double* out, int threads) {
    std::vector<size_t> first(n + 1);  // piece of parameter i; after the last one, the number of pieces
    for (size_t i = 0; i < n; ++i) first[i + 1] = first[i] + static_cast<size_t>((counts[i] + kPiece - 1) / kPiece);
    std::vector<double> sums(first[n]);
    parallel_for(sums.size(), threads, [&](size_t piece) {
        const auto after = std::upper_bound(first.begin(), first.end(), piece);
        const size_t i = static_cast<size_t>(after - first.begin()) - 1;
        const int64_t start = static_cast<int64_t>(piece - first[i]) * kPiece;
        sums[piece] = sum_of_squares(x + offsets[i] + start, std::min(kPiece, counts[i] - start));
    });
    for (size_t i = 0; i < n; ++i)
        out[i] = std::sqrt(std::accumulate(sums.data() + first[i], sums.data() + first[i + 1], 0.0));
}

template decltype(norms<float>) norms<float>;
template decltype(norms<bf16>) norms<bf16>;

}  // namespace mpipipe::cpu
