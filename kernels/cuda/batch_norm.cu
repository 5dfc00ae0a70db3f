// Two passes over the tensors: the sums of each piece of a channel, then what is made of every element with the sums of
// all pieces, which are added up in between. A thread adds a run of elements in float32 and goes on in double: so few
// additions in double cost nothing beside reading the elements, also on a GPU that is slow at them.
#include "mpipipe/batch_norm.h"

#include "launch.cuh"

namespace mpipipe::cuda {
namespace {

constexpr size_t kFewest = 32;       // elements of a thread, where a channel has as many
constexpr size_t kEnough = 1 << 19;  // threads that keep every GPU busy
constexpr size_t kSector = 32;       // bytes that memory hands out at once

// Who works on what. Element j of a channel is place j % places of sample j / places. A channel is cut into pieces, and
// `lanes` threads take the elements of a piece in turn: those of a block; or, where a sample has less than a sector of
// a channel, as many as it has places, so that the next threads have the next channel, and warps read sectors whole.
struct Cut {
    size_t channels, places, count;  // count: elements of a channel
    size_t lanes, of_piece, pieces;  // of_piece: elements of a piece
    size_t samples_on, places_on;    // to the next element of a thread

    template <typename T>
    static Cut of(const T*, size_t batch, size_t channels, size_t places) {
        const auto parts = [](size_t n, size_t part) { return (n + part - 1) / part; };
        Cut cut{};
        cut.channels = channels;
        cut.places = places;
        cut.count = batch * places;
        if (channels == 0 || cut.count == 0) return cut;  // without pieces
        cut.lanes = places * sizeof(T) < kSector ? places : kThreads;
        const size_t most = std::max<size_t>(kEnough / (channels * cut.lanes), 1);
        const size_t wanted = std::min(parts(cut.count, kFewest * cut.lanes), most);
        cut.of_piece = parts(parts(cut.count, wanted), cut.lanes) * cut.lanes;
        cut.pieces = parts(cut.count, cut.of_piece);
        cut.samples_on = cut.lanes / places;
        cut.places_on = cut.lanes % places;
        return cut;
    }

    MPIPIPE_ANYWHERE bool by_block() const { return lanes == kThreads; }
    MPIPIPE_ANYWHERE size_t threads() const { return channels * pieces * lanes; }
    // Of a channel; they lie together.
    MPIPIPE_ANYWHERE size_t partial_sums() const { return by_block() ? pieces : pieces * lanes; }
};

// The way of thread t through its elements.
struct Walk {
    size_t lane, channel, piece;
    size_t left;  // elements, at first
    size_t at;    // where the next one is

    __device__ Walk(const Cut& cut, size_t t) : lane(t % cut.lanes) {
        const size_t group = t / cut.lanes;
        channel = group % cut.channels;
        piece = group / cut.channels;
        const size_t begin = piece * cut.of_piece, first = begin + lane, rest = cut.count - begin;
        const size_t end = begin + (rest < cut.of_piece ? rest : cut.of_piece), sample = first / cut.places;
        left = first < end ? (end - first + cut.lanes - 1) / cut.lanes : 0;
        place_ = first - sample * cut.places;
        at = (sample * cut.channels + channel) * cut.places + place_;
        places_ = cut.places;
        places_on_ = cut.places_on;
        on_ = cut.samples_on * cut.channels * cut.places + cut.places_on;
        over_others_ = (cut.channels - 1) * cut.places;
    }

    __device__ void next() {
        at += on_;
        place_ += places_on_;
        if (place_ < places_) return;
        place_ -= places_;
        at += over_others_;
    }
    template <unsigned kRun>
    __device__ void next_run() {
#pragma unroll
        for (unsigned i = 0; i < kRun; ++i) next();
    }

  private:
    size_t place_, places_, places_on_, on_, over_others_;
};

// The next n elements of a tensor, zeros behind them. All are loaded before one is used, so that a thread waits once.
template <unsigned kRun>
struct Run {
    float of[kRun];

    template <typename T>
    __device__ Run(const T* tensor, Walk walk, unsigned n) {
#pragma unroll
        for (unsigned i = 0; i < kRun; ++i, walk.next()) of[i] = i < n ? wide(tensor[walk.at]) : 0.0f;
    }
    template <typename T>
    __device__ void write(T* tensor, Walk walk, unsigned n) const {
#pragma unroll
        for (unsigned i = 0; i < kRun; ++i, walk.next())
            if (i < n) tensor[walk.at] = narrow<T>(of[i]);
    }
};

struct Sums {
    double a = 0, b = 0;
};

// of_run(walk, n) of each run that a thread goes through, the last one shorter.
template <unsigned kRun, typename OfRun>
__device__ Sums sum_of_runs(Walk walk, OfRun of_run) {
    Sums sums;
    for (size_t left = walk.left; left; walk.template next_run<kRun>()) {
        const unsigned n = left < kRun ? static_cast<unsigned>(left) : kRun;
        const Sums run = of_run(walk, n);
        sums.a += run.a;
        sums.b += run.b;
        left -= n;
    }
    return sums;
}

// partial[channel, piece] = terms(walk) of the threads of a piece: of all, or of each where they are not a block.
template <typename Terms>
__global__ void sum_pieces(Terms terms, Cut cut, Sums* partial) {
    for (size_t t = thread(); t < cut.threads(); t += threads()) {
        const Walk walk(cut, t);
        const Sums sums = terms(walk);
        Sums* const to = partial + walk.channel * cut.partial_sums();
        if (cut.by_block()) {
            const Sums piece = {over_block<Sum>(sums.a), over_block<Sum>(sums.b)};
            if (threadIdx.x == 0) to[walk.piece] = piece;
        } else {
            to[walk.piece * cut.lanes + walk.lane] = sums;
        }
    }
}

// Those of a channel, on each thread of a block.
__device__ inline Sums sum_of_pieces(const Sums* partial, const Cut& cut, size_t channel) {
    Sums sums;
    for (size_t i = threadIdx.x; i < cut.partial_sums(); i += kThreads) {
        const Sums piece = partial[channel * cut.partial_sums() + i];
        sums.a += piece.a;
        sums.b += piece.b;
    }
    return {over_block<Sum>(sums.a), over_block<Sum>(sums.b)};
}

// s of one channel. Multiplications and additions are fused by name, here and in the gradient: the bits are the same
// wherever the formula stands.
struct Affine {
    float mean, scale, bias;

    __device__ float operator()(float x) const { return fmaf(x - mean, scale, bias); }
};
struct Affines {
    const float *weight, *bias, *mean, *rstd;  // the first two may be null

    __device__ Affine of(size_t c) const {
        return {mean[c], rstd[c] * (weight ? weight[c] : 1.0f), bias ? bias[c] : 0.0f};
    }
};

__device__ inline float finite_or_0(float x) { return fabsf(x) < INFINITY ? x : 0.0f; }

// Sums of x and of its square, so that it is read once for both mean and variance. float32 has the distances from the
// mean of a run, and double what those means add: there the digits are that cancel in the variance.
template <typename T>
struct Moments {
    const T* x;

    __device__ Sums operator()(const Walk& way) const {
        constexpr unsigned kRun = 16;
        return sum_of_runs<kRun>(way, [this](const Walk& walk, unsigned n) -> Sums {
            const Run<kRun> run(x, walk, n);
            float sum = 0, rest = 0, squares = 0;
#pragma unroll
            for (unsigned i = 0; i < kRun; ++i) sum += run.of[i];
            const float centre = finite_or_0(sum / static_cast<float>(n));
#pragma unroll
            for (unsigned i = 0; i < kRun; ++i) {
                const float centred = i < n ? run.of[i] - centre : 0.0f;
                rest += centred;
                squares += centred * centred;
            }
            const double all = double{centre} * n;
            return {all + rest, centre * (all + 2.0 * rest) + squares};
        });
    }
};

__global__ void statistics(Cut cut, const Sums* partial, float eps, float* mean, float* variance, float* rstd) {
    for (size_t c = blockIdx.x; c < cut.channels; c += gridDim.x) {
        const Sums sums = sum_of_pieces(partial, cut, c);
        if (threadIdx.x) continue;
        const double n = static_cast<double>(cut.count), centre = sums.a / n;
        const double found = sums.b - sums.a * centre, squares = found < 0 ? 0 : found;  // NaN stays
        mean[c] = static_cast<float>(centre);
        variance[c] = static_cast<float>(squares / (n - 1));
        rstd[c] = static_cast<float>(1 / sqrt(squares / n + eps));
    }
}

template <typename T>
__global__ void forward(const T* __restrict__ x, const T* __restrict__ residual, Affines affines, bool relu,
                        T* __restrict__ y, Cut cut) {
    for (size_t i = thread(); i < cut.threads(); i += threads()) {
        Walk walk(cut, i);
        const Affine s = affines.of(walk.channel);
#pragma unroll 4
        for (size_t left = walk.left; left; --left, walk.next()) {
            float t = s(wide(x[walk.at]));
            if (residual) t = wide(narrow<T>(t)) + wide(residual[walk.at]);
            y[walk.at] = narrow<T>(relu && t < 0.0f ? 0.0f : t);
        }
    }
}

// The gradient of t, what the ReLU reads.
__device__ inline float passed(float t, float dy) { return t <= 0.0f ? 0.0f : dy; }

// Sums of the gradient of t and of its products with x - mean; the gradient is kept where that is wanted.
template <typename T>
struct Products {
    const T *dy, *x, *y;
    Affines affines;
    bool relu;
    T* kept;  // or null

    __device__ Sums operator()(const Walk& way) const {
        constexpr unsigned kRun = 8;  // of each tensor
        const Affine s = affines.of(way.channel);
        return sum_of_runs<kRun>(way, [this, s](const Walk& walk, unsigned n) -> Sums {
            const Run<kRun> of_x(x, walk, n), of_y(y, walk, relu && y ? n : 0);
            Run<kRun> g(dy, walk, n);
            float sum_g = 0, sum_gc = 0;
#pragma unroll
            for (unsigned i = 0; i < kRun; ++i) {
                if (relu) g.of[i] = passed(y ? of_y.of[i] : s(of_x.of[i]), g.of[i]);
                sum_g += g.of[i];
                sum_gc = fmaf(g.of[i], of_x.of[i] - s.mean, sum_gc);
            }
            if (kept) g.write(kept, walk, n);
            return {sum_g, sum_gc};
        });
    }
};

// As the gradient of x has them: scale * mean(g), and scale * mean(g * h) as a factor of x - mean.
struct Means {
    float g, gc;
};

__global__ void means(Affines affines, Cut cut, const Sums* partial, float* dweight, float* dbias, Means* found) {
    for (size_t c = blockIdx.x; c < cut.channels; c += gridDim.x) {
        const Sums sums = sum_of_pieces(partial, cut, c);
        if (threadIdx.x) continue;
        const double n = static_cast<double>(cut.count), scale = affines.of(c).scale, inverse = affines.rstd[c];
        if (dweight) dweight[c] = static_cast<float>(sums.b * inverse);
        if (dbias) dbias[c] = static_cast<float>(sums.a);
        found[c] = {static_cast<float>(scale * sums.a / n), static_cast<float>(scale * inverse * inverse * sums.b / n)};
    }
}

// dx = scale * (g - mean(g) - h * mean(g * h))
template <typename T>
__global__ void backward(const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ y, Affines affines,
                         bool relu, const Means* found, T* __restrict__ dx, Cut cut) {
    for (size_t i = thread(); i < cut.threads(); i += threads()) {
        Walk walk(cut, i);
        const Affine s = affines.of(walk.channel);
        const Means mean = found[walk.channel];
#pragma unroll 4
        for (size_t left = walk.left; left; --left, walk.next()) {
            const float of_x = wide(x[walk.at]);
            float g = wide(dy[walk.at]);
            if (relu) g = passed(y ? wide(y[walk.at]) : s(of_x), g);
            dx[walk.at] = narrow<T>(fmaf(s.mean - of_x, mean.gc, fmaf(s.scale, g, -mean.g)));
        }
    }
}

}  // namespace

template <typename T>
void batch_norm(const T* x, const T* residual, const float* weight, const float* bias, float eps, bool relu, T* y,
                float* mean, float* variance, float* rstd, size_t batch, size_t channels, size_t places,
                CudaStream stream) {
    const Cut cut = Cut::of(x, batch, channels, places);
    const Workspace<Sums> partial(channels * cut.partial_sums(), stream);
    const dim3 of_elements(blocks_of_threads(cut.threads()));
    launch(sum_pieces<Moments<T>>, of_elements, stream, Moments<T>{x}, cut, partial.p);
    launch(statistics, dim3(blocks(channels)), stream, cut, partial.p, eps, mean, variance, rstd);
    launch(forward<T>, of_elements, stream, x, residual, Affines{weight, bias, mean, rstd}, relu, y, cut);
}

template <typename T>
void batch_norm_backward(const T* dy, const T* x, const T* y, const float* weight, const float* bias,
                         const float* mean, const float* rstd, bool relu, T* dx, T* dresidual, float* dweight,
                         float* dbias, size_t batch, size_t channels, size_t places, CudaStream stream) {
    const Cut cut = Cut::of(x, batch, channels, places);
    const Affines affines{weight, bias, mean, rstd};
    const Workspace<Sums> partial(channels * cut.partial_sums(), stream);
    const Workspace<Means> found(channels, stream);
    const dim3 of_elements(blocks_of_threads(cut.threads()));
    launch(sum_pieces<Products<T>>, of_elements, stream, Products<T>{dy, x, y, affines, relu, dresidual}, cut,
           partial.p);
    launch(means, dim3(blocks(channels)), stream, affines, cut, partial.p, dweight, dbias, found.p);
    if (dresidual)  // which is the gradient behind the ReLU
        launch(backward<T>, of_elements, stream, dresidual, x, nullptr, affines, false, found.p, dx, cut);
    else
        launch(backward<T>, of_elements, stream, dy, x, y, affines, relu, found.p, dx, cut);
}

template decltype(batch_norm<float>) batch_norm<float>;
template decltype(batch_norm<bf16>) batch_norm<bf16>;
template decltype(batch_norm_backward<float>) batch_norm_backward<float>;
template decltype(batch_norm_backward<bf16>) batch_norm_backward<bf16>;

}  // namespace mpipipe::cuda
