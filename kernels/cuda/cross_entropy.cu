// A block for each row of a tile: its largest logit, then the sum. One block for the loss of all rows.
#include "mpipipe/cross_entropy.h"

#include "launch.cuh"
#include "mpipipe/math.h"

namespace mpipipe::cuda {
namespace {

template <typename T>
struct Logits {
    const T* p;
    const float* bias;  // or null
    size_t columns;
    __device__ float operator()(size_t r, size_t c) const { return wide(p[r * columns + c]) + (bias ? bias[c] : 0.0f); }
};

template <typename T>
__global__ void forward(Logits<T> logits, size_t rows, const int64_t* labels, int64_t first, int64_t ignored,
                        double* states) {
    for (size_t r = blockIdx.x; r < rows; r += gridDim.x) {
        if (labels[r] == ignored) continue;  // for all threads of the block
        double* const state = states + 4 * r;
        const bool fresh = first == 0;
        const float before = fresh ? -INFINITY : static_cast<float>(state[0]);
        float most = before;
        double total = 0;
        for (size_t c = threadIdx.x; c < logits.columns; c += kThreads) {
            const float x = logits(r, c);
            most = fmaxf(most, x);
            total += x;
        }
        most = over_block<Largest>(most);
        total = over_block<Sum>(total);
        // all -infinity so far: their difference would be NaN, their probability is 0
        const float shift = most == -INFINITY ? 0.0f : most;
        double sum = 0;
        for (size_t c = threadIdx.x; c < logits.columns; c += kThreads) sum += exp_(logits(r, c) - shift);
        sum = over_block<Sum>(sum);
        if (threadIdx.x) continue;
        double old = fresh ? 0.0 : state[1];
        if (most > before) old *= exp(double{before} - double{most});
        state[0] = most;
        state[1] = old + sum;
        if (const size_t c = column(labels[r], first); c < logits.columns) state[2] = logits(r, c);
        else if (fresh) state[2] = 0;
        state[3] = (fresh ? 0.0 : state[3]) + total;
    }
}

__global__ void sum_losses(const double* states, size_t rows, const int64_t* labels, int64_t entries, int64_t ignored,
                           double smoothing, float* log_sum, float* loss) {
    double total = 0;
    for (size_t r = threadIdx.x; r < rows; r += kThreads) {
        double sum = 0;
        if (labels[r] != ignored) {
            const double* const state = states + 4 * r;
            sum = state[0] + log(state[1]);
            total += sum - (1.0 - smoothing) * state[2];
            if (smoothing != 0.0) total -= smoothing / static_cast<double>(entries) * state[3];
        }
        log_sum[r] = static_cast<float>(sum);
    }
    total = over_block<Sum>(total);
    if (threadIdx.x == 0) *loss = static_cast<float>(total);
}

template <typename T>
__global__ void backward(Logits<T> logits, T* gradients, size_t rows, const int64_t* labels, int64_t first,
                         int64_t ignored, const float* log_sum, float on_label, float on_all, float scale) {
    for (size_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (size_t c = threadIdx.x; c < logits.columns; c += kThreads) {
            float gradient = (exp_(logits(r, c) - log_sum[r]) - on_all) * scale;
            if (c == column(labels[r], first)) gradient -= on_label * scale;
            gradients[r * logits.columns + c] = narrow<T>(labels[r] == ignored ? 0.0f : gradient);
        }
}

}  // namespace

template <typename T>
void cross_entropy_forward(const T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                           int64_t first, int64_t ignored, double* state, CudaStream stream) {
    launch(forward<T>, dim3(blocks(rows)), stream, Logits<T>{logits, bias, columns}, rows, labels, first, ignored,
           state);
}

bool cross_entropy_loss(const double* state, size_t rows, const int64_t* labels, int64_t entries, int64_t ignored,
                        double smoothing, float* log_sum, float* loss, CudaStream stream) {
    launch(sum_losses, dim3(1), stream, state, rows, labels, entries, ignored, smoothing, log_sum, loss);
    return false;
}

template <typename T>
void cross_entropy_backward(T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                            int64_t first, int64_t ignored, const float* log_sum, float on_label, float on_all,
                            float scale, CudaStream stream) {
    launch(backward<T>, dim3(blocks(rows)), stream, Logits<T>{logits, bias, columns}, logits, rows, labels, first,
           ignored, log_sum, on_label, on_all, scale);
}

template decltype(cross_entropy_forward<float>) cross_entropy_forward<float>;
template decltype(cross_entropy_forward<bf16>) cross_entropy_forward<bf16>;
template decltype(cross_entropy_backward<float>) cross_entropy_backward<float>;
template decltype(cross_entropy_backward<bf16>) cross_entropy_backward<bf16>;

}  // namespace mpipipe::cuda
