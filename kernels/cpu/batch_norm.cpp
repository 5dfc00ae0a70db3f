// Channel by channel: the few passes over one find it in the second-level cache, so memory sees each tensor once. A
// channel is one thread's.
#include "mpipipe/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "mpipipe/run_sum.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kRun = 2048;    // elements summed in float32 before the sum goes on in double
constexpr size_t kShort = 128;   // places; loops over fewer are not worth their start
constexpr size_t kTogether = 8;  // channels of a piece of work

// Where the elements of a channel lie: `places` of them in each sample, samples `stride` apart.
struct Channel {
    size_t batch, stride, places;

    double count() const { return static_cast<double>(batch * places); }

    // body(offset, elements) for each run of a channel, first to last or back: what was read last is nearest.
    template <typename Body>
    void runs(bool back, Body body) const {
        const size_t pieces = (places + kRun - 1) / kRun, n = batch * pieces;
        for (size_t i = 0; i < n; ++i) {
            const size_t run = back ? n - 1 - i : i, at = run % pieces * kRun;
            body(run / pieces * stride + at, std::min(kRun, places - at));
        }
    }
};

// Channels of tensors (batch, channels, places), in one piece each: where they are long enough they stay in place,
// else they are copied.
template <typename T>
class Pieces {
  public:
    Pieces(size_t batch, size_t channels, size_t places)
        : there_{batch, channels * places, places}, copied_(places < kShort && batch > 1),
          room_(new T[copied_ ? kTensors * batch * places : 0]) {}

    Channel channel() const { return copied_ ? Channel{1, 0, there_.batch * there_.places} : there_; }

    // Channel c of a tensor, or null; `slot` is the same for no two at a time.
    const T* read(const T* tensor, size_t c, size_t slot) const {
        if (!copied_ || !tensor) return tensor ? tensor + c * there_.places : nullptr;
        each(tensor, c, slot, [&](const T* there, T* here) { std::copy_n(there, there_.places, here); });
        return at(slot);
    }
    T* to_write(T* tensor, size_t c, size_t slot) const {
        return !copied_ || !tensor ? tensor ? tensor + c * there_.places : nullptr : at(slot);
    }
    void written(T* tensor, size_t c, size_t slot) const {
        if (!copied_ || !tensor) return;
        each(tensor, c, slot, [&](T* there, const T* here) { std::copy_n(here, there_.places, there); });
    }

  private:
    static constexpr size_t kTensors = 5;

    T* at(size_t slot) const { return room_.get() + slot * there_.batch * there_.places; }
    template <typename U, typename Copy>
    void each(U* tensor, size_t c, size_t slot, Copy copy) const {
        for (size_t b = 0; b < there_.batch; ++b)
            copy(tensor + b * there_.stride + c * there_.places, at(slot) + b * there_.places);
    }

    const Channel there_;
    const bool copied_;
    const std::unique_ptr<T[]> room_;
};

// s of one channel: the same bits wherever it is computed. Before an addition it is rounded; the ReLU chooses alike
// before and after a rounding.
struct Affine {
    float mean, scale, bias;

    template <typename T>
    float operator()(T x) const {
        return (wide(x) - mean) * scale + bias;
    }
};

template <bool relu, bool add, typename T>
[[gnu::noinline]] void run_forward(const T* __restrict x, const T* __restrict residual, Affine s, T* __restrict y,
                                   size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        float t = s(x[i]);
        if (add) t = wide(narrow<T>(t)) + wide(residual[i]);
        y[i] = narrow<T>(relu && t < 0.0f ? 0.0f : t);
    }
}

struct Statistics {
    float mean, variance, rstd;
};

template <typename T>
Statistics statistics(const T* x, float eps, Channel channel) {
    const double n = channel.count();
    double sum = 0, squares = 0;
    channel.runs(false, [&](size_t at, size_t run) { sum += run_sum<false>(x + at, 0.0f, run); });
    const double mean = sum / n;
    const float centre = static_cast<float>(mean);
    channel.runs(true, [&](size_t at, size_t run) { squares += run_sum<true>(x + at, centre, run); });
    squares = std::max(squares - n * (mean - centre) * (mean - centre), 0.0);  // in this order: NaN stays
    return {centre, static_cast<float>(squares / (n - 1)), static_cast<float>(1 / std::sqrt(squares / n + eps))};
}

template <bool relu, bool add, typename T>
void forward(const T* x, const T* residual, const float* weight, const float* bias, float eps, T* y, float* mean,
             float* variance, float* rstd, size_t batch, size_t channels, size_t places, int threads) {
    parallel_pieces(channels, kTogether, threads, [=](size_t first, size_t last) {
        const Pieces<T> pieces(batch, channels, places);
        const Channel channel = pieces.channel();
        for (size_t c = first; c < last; ++c) {
            const T *const of_x = pieces.read(x, c, 0), *const of_residual = add ? pieces.read(residual, c, 1) : of_x;
            T* const of_y = pieces.to_write(y, c, 2);
            const Statistics found = statistics(of_x, eps, channel);
            mean[c] = found.mean, variance[c] = found.variance, rstd[c] = found.rstd;
            const Affine s{mean[c], rstd[c] * (weight ? weight[c] : 1.0f), bias ? bias[c] : 0.0f};
            channel.runs(false, [&](size_t at, size_t run) {
                run_forward<relu, add>(of_x + at, of_residual + at, s, of_y + at, run);
            });
            pieces.written(y, c, 2);
        }
    });
}

// How backward knows where the ReLU let pass.
enum class Passed { everywhere, by_x, by_y };

template <Passed passed, typename T>
float gradient(T dy, T x, T y, Affine s) {
    const float t = passed == Passed::by_x ? s(x) : passed == Passed::by_y ? wide(y) : 1.0f;
    return t <= 0.0f ? 0.0f : wide(dy);
}

struct Sums {
    double g = 0, gc = 0;  // of the gradient of t, and of its products with x - mean
};

// Adds a run to the sums, and keeps the gradient of t where it is wanted.
template <Passed passed, bool keep, typename T>
[[gnu::noinline]] void run_sums(const T* __restrict dy, const T* __restrict x, const T* __restrict y, Affine s,
                                T* __restrict kept, size_t n, Sums& sums) {
    float sum_g = 0, sum_gc = 0;
#pragma omp simd reduction(+ : sum_g, sum_gc)
    for (size_t i = 0; i < n; ++i) {
        const float g = gradient<passed>(dy[i], x[i], y[i], s);
        sum_g += g;
        sum_gc += g * (wide(x[i]) - s.mean);
        if (keep) kept[i] = narrow<T>(g);
    }
    sums.g += sum_g;
    sums.gc += sum_gc;
}

// dx = scale * (g - mean(g) - h * mean(g * h))
template <Passed passed, typename T>
[[gnu::noinline]] void run_gradient(const T* __restrict dy, const T* __restrict x, const T* __restrict y, Affine s,
                                    float mean_g, float mean_gc, T* __restrict dx, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) {
        const float g = gradient<passed>(dy[i], x[i], y[i], s);
        dx[i] = narrow<T>((s.scale * g - mean_g) - (wide(x[i]) - s.mean) * mean_gc);
    }
}

template <Passed passed, bool keep, typename T>
Sums channel_gradient(const T* dy, const T* x, const T* y, Affine s, float rstd, T* dx, T* kept, Channel channel) {
    Sums sums;
    channel.runs(false, [&](size_t at, size_t run) {
        run_sums<passed, keep>(dy + at, x + at, y + at, s, keep ? kept + at : nullptr, run, sums);
    });
    const double n = channel.count(), scale = s.scale, inverse = rstd;
    const float mean_g = static_cast<float>(scale * sums.g / n);
    const float mean_gc = static_cast<float>(scale * inverse * inverse * sums.gc / n);
    channel.runs(true, [&](size_t at, size_t run) {
        if (keep)  // which is the gradient behind the ReLU already, and near
            run_gradient<Passed::everywhere>(kept + at, x + at, x + at, s, mean_g, mean_gc, dx + at, run);
        else
            run_gradient<passed>(dy + at, x + at, y + at, s, mean_g, mean_gc, dx + at, run);
    });
    return sums;
}

template <Passed passed, bool keep, typename T>
void backward(const T* dy, const T* x, const T* y, const float* weight, const float* bias, const float* mean,
              const float* rstd, T* dx, T* dresidual, float* dweight, float* dbias, size_t batch, size_t channels,
              size_t places, int threads) {
    parallel_pieces(channels, kTogether, threads, [=](size_t first, size_t last) {
        const Pieces<T> pieces(batch, channels, places);
        for (size_t c = first; c < last; ++c) {
            const Affine s{mean[c], rstd[c] * (weight ? weight[c] : 1.0f), bias ? bias[c] : 0.0f};
            const T *const of_dy = pieces.read(dy, c, 0), *const of_x = pieces.read(x, c, 1);
            const T* const of_y = passed == Passed::by_y ? pieces.read(y, c, 2) : of_x;
            const Sums sums = channel_gradient<passed, keep>(of_dy, of_x, of_y, s, rstd[c], pieces.to_write(dx, c, 3),
                                                             pieces.to_write(dresidual, c, 4), pieces.channel());
            if (dweight) dweight[c] = static_cast<float>(sums.gc * rstd[c]);
            if (dbias) dbias[c] = static_cast<float>(sums.g);
            pieces.written(dx, c, 3);
            pieces.written(dresidual, c, 4);
        }
    });
}

}  // namespace

template <typename T>
void batch_norm(const T* x, const T* residual, const float* weight, const float* bias, float eps, bool relu, T* y,
                float* mean, float* variance, float* rstd, size_t batch, size_t channels, size_t places,
                int threads) {
    const auto run = relu ? residual ? forward<true, true, T> : forward<true, false, T>
                          : residual ? forward<false, true, T> : forward<false, false, T>;
    run(x, residual, weight, bias, eps, y, mean, variance, rstd, batch, channels, places, threads);
}

template <typename T>
void batch_norm_backward(const T* dy, const T* x, const T* y, const float* weight, const float* bias,
                         const float* mean, const float* rstd, bool relu, T* dx, T* dresidual, float* dweight,
                         float* dbias, size_t batch, size_t channels, size_t places, int threads) {
    const auto choose = [&](auto keep) {
        return !relu ? backward<Passed::everywhere, decltype(keep)::value, T>
               : y   ? backward<Passed::by_y, decltype(keep)::value, T>
                     : backward<Passed::by_x, decltype(keep)::value, T>;
    };
    const auto run = dresidual ? choose(std::true_type()) : choose(std::false_type());
    run(dy, x, y, weight, bias, mean, rstd, dx, dresidual, dweight, dbias, batch, channels, places, threads);
}

template decltype(batch_norm<float>) batch_norm<float>;
template decltype(batch_norm<bf16>) batch_norm<bf16>;
template decltype(batch_norm_backward<float>) batch_norm_backward<float>;
template decltype(batch_norm_backward<bf16>) batch_norm_backward<bf16>;

}  // namespace mpipipe::cpu
