// The meaning, one element after the other in float64. Slow on purpose.
#include "mpipipe/cross_entropy.h"

#include <cmath>

namespace mpipipe::reference {
namespace {

template <typename T>
double logit(const T* logits, const float* bias, size_t i, size_t c) {
    return double{wide(logits[i])} + (bias ? bias[c] : 0.0f);
}

}  // namespace

template <typename T>
void cross_entropy_forward(const T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                           int64_t first, int64_t ignored, double* state, int) {
    for (size_t r = 0; r < rows; ++r) {
        if (labels[r] == ignored) continue;
        double* of_row = state + 4 * r;
        if (first == 0) {
            of_row[0] = -INFINITY;
            of_row[1] = of_row[2] = of_row[3] = 0;
        }
        for (size_t c = 0; c < columns; ++c) {
            const double x = logit(logits, bias, r * columns + c, c);
            if (x > of_row[0]) {
                of_row[1] *= std::exp(of_row[0] - x);
                of_row[0] = x;
            }
            const bool nothing = of_row[0] == -INFINITY && x == -INFINITY;
            of_row[1] += nothing ? 0.0 : std::exp(x - of_row[0]);
            if (first + static_cast<int64_t>(c) == labels[r]) of_row[2] = x;
            of_row[3] += x;
        }
    }
}

bool cross_entropy_loss(const double* state, size_t rows, const int64_t* labels, int64_t entries, int64_t ignored,
                        double smoothing, float* log_sum, float* loss, int) {
    double total = 0;
    bool inside = true;
    for (size_t r = 0; r < rows; ++r) {
        double sum = 0;
        if (labels[r] != ignored) {
            const double* of_row = state + 4 * r;
            sum = of_row[0] + std::log(of_row[1]);
            total += sum - (1.0 - smoothing) * of_row[2];
            if (smoothing != 0.0) total -= smoothing / static_cast<double>(entries) * of_row[3];
            inside = inside && labels[r] >= 0 && labels[r] < entries;
        }
        log_sum[r] = static_cast<float>(sum);
    }
    *loss = static_cast<float>(total);
    return inside;
}

template <typename T>
void cross_entropy_backward(T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                            int64_t first, int64_t ignored, const float* log_sum, float on_label, float on_all,
                            float scale, int) {
    for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < columns; ++c) {
            const double x = logit(logits, bias, r * columns + c, c);
            const bool label = first + static_cast<int64_t>(c) == labels[r];
            const double gradient = std::exp(x - log_sum[r]) - on_all - (label ? on_label : 0.0f);
            logits[r * columns + c] = narrow<T>(labels[r] == ignored ? 0.0f : static_cast<float>(gradient * scale));
        }
    }
}

template decltype(cross_entropy_forward<float>) cross_entropy_forward<float>;
template decltype(cross_entropy_forward<bf16>) cross_entropy_forward<bf16>;
template decltype(cross_entropy_backward<float>) cross_entropy_backward<float>;
template decltype(cross_entropy_backward<bf16>) cross_entropy_backward<bf16>;

}  // namespace mpipipe::reference
