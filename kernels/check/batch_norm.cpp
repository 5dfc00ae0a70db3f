#include "mpipipe/batch_norm.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

template <typename T>
struct Case {
    size_t batch, channels, places;
    bool relu, add, affine;
    Buffer<T> x, residual, dy;
    Buffer<float> weight, bias;

    Case(size_t b, size_t c, size_t p, bool with_relu, bool with_residual, bool with_weights, Draw& draw)
        : batch(b), channels(c), places(p), relu(with_relu), add(with_residual), affine(with_weights),
          x(draw.normal<T>(b * c * p, 3)), residual(draw.normal<T>(b * c * p)), dy(draw.normal<T>(b * c * p)),
          weight(draw.normal<float>(c)), bias(draw.normal<float>(c)) {}

    std::string text() const {
        return std::to_string(batch) + " x " + std::to_string(channels) + " x " + std::to_string(places) +
               (relu ? ", ReLU" : "") + (add ? ", residual" : "") + (affine ? "" : ", plain");
    }
};

template <typename T>
struct Forward {
    Buffer<T> y;
    Buffer<float> mean, variance, rstd;

    template <typename Kernel>
    Forward(Kernel kernel, const Case<T>& c, int threads)
        : y(c.x.size()), mean(c.channels), variance(c.channels), rstd(c.channels) {
        kernel(c.x.data(), c.add ? c.residual.data() : nullptr, c.affine ? c.weight.data() : nullptr,
               c.affine ? c.bias.data() : nullptr, 1e-5f, c.relu, y.data(), mean.data(), variance.data(), rstd.data(),
               c.batch, c.channels, c.places, threads);
    }
};

template <typename T>
struct Backward {
    Buffer<T> dx, dresidual;
    Buffer<float> dweight, dbias;

    template <typename Kernel>
    Backward(Kernel kernel, const Case<T>& c, const Forward<T>& f, int threads)
        : dx(c.x.size()), dresidual(c.dy), dweight(c.channels), dbias(c.channels) {
        kernel(c.dy.data(), c.x.data(), c.relu && c.add ? f.y.data() : nullptr, c.affine ? c.weight.data() : nullptr,
               c.affine ? c.bias.data() : nullptr, f.mean.data(), f.rstd.data(), c.relu, dx.data(),
               c.add ? dresidual.data() : nullptr, dweight.data(), dbias.data(), c.batch, c.channels, c.places,
               threads);
    }
};

template <typename T>
void compare(Run& run, const Case<T>& c) {
    constexpr bool is_wide = std::is_same_v<T, float>;
    const double bound = is_wide ? 2e-5 : 2 * rounding<bf16>();
    const Forward<T> got(cpu::batch_norm<T>, c, 1), threaded(cpu::batch_norm<T>, c, many);
    const Forward<T> want(reference::batch_norm<T>, c, 1);
    if (c.batch * c.places) {  // nothing has no mean
        run.close("mean, " + c.text(), got.mean, want.mean, 1e-6, 1);
        run.close("variance, " + c.text(), got.variance, want.variance, 4e-6, 1e-6);
        run.close("rstd, " + c.text(), got.rstd, want.rstd, 1e-6);
    }
    run.close("y, " + c.text(), got.y, want.y, bound, 0.1);
    run.same("y on threads, " + c.text(), threaded.y, got.y);
    run.same("variance on threads, " + c.text(), threaded.variance, got.variance);
    const Backward<T> got_back(cpu::batch_norm_backward<T>, c, got, 1);
    const Backward<T> threaded_back(cpu::batch_norm_backward<T>, c, got, many);
    const Backward<T> want_back(reference::batch_norm_backward<T>, c, got, 1);
    run.close("dx, " + c.text(), got_back.dx, want_back.dx, bound, 1);
    run.same("dresidual, " + c.text(), got_back.dresidual, want_back.dresidual);
    const double walk = 1 + std::sqrt(static_cast<double>(c.batch * c.places));  // of a sum of numbers about 1
    if (c.batch * c.places) run.close("dweight, " + c.text(), got_back.dweight, want_back.dweight, 1e-5, walk);
    run.close("dbias, " + c.text(), got_back.dbias, want_back.dbias, 1e-5, walk);
    run.same("dx on threads, " + c.text(), threaded_back.dx, got_back.dx);
    run.same("dweight on threads, " + c.text(), threaded_back.dweight, got_back.dweight);
}

// The bits of the norm alone, then the addition and the ReLU.
template <typename T>
void compare_with_apart(Run& run, const Case<T>& c) {
    Case<T> alone(c);
    alone.relu = alone.add = false;
    const Forward<T> whole(cpu::batch_norm<T>, c, 1);
    Forward<T> apart(cpu::batch_norm<T>, alone, 1);
    for (size_t i = 0; i < apart.y.size(); ++i) {
        T& t = apart.y[i];
        if (c.add) t = narrow<T>(wide(t) + wide(c.residual[i]));
        if (c.relu && wide(t) <= 0) alone.dy[i] = narrow<T>(0);
        if (c.relu && wide(t) < 0) t = narrow<T>(0);
    }
    run.same("y apart, " + c.text(), whole.y, apart.y);
    const Backward<T> of_whole(cpu::batch_norm_backward<T>, c, whole, 1);
    const Backward<T> of_alone(cpu::batch_norm_backward<T>, alone, apart, 1);
    run.same("dx apart, " + c.text(), of_whole.dx, of_alone.dx);
    run.same("dweight apart, " + c.text(), of_whole.dweight, of_alone.dweight);
}

template <typename T>
void batch_norm(Run& run, Draw& draw) {
    for (size_t batch : {0, 1, 2, 5})
        for (size_t channels : {0, 1, 3, 8})
            for (size_t places : {0, 1, 7, 16, 33, 500})
                for (bool relu : {false, true})
                    for (bool add : {false, true})
                        if (batch * places != 1)  // has no variance, and so close to no gradient
                            compare(run, Case<T>(batch, channels, places, relu, add, relu || add, draw));
    // channels of several pieces of work
    for (bool relu : {false, true})
        for (bool add : {false, true}) {
            const Case<T> several[] = {{97, 5, 1, relu, add, true, draw},
                                       {130, 3, 3, relu, add, true, draw},
                                       {1100, 2, 17, relu, add, true, draw},
                                       {2, 2, 12345, relu, add, true, draw}};
            for (const Case<T>& c : several) compare(run, c), compare_with_apart(run, c);
        }
}

// Channels far from 0, of one number, that begin with an outlier, and with numbers that are not finite.
template <typename T>
void odd_channels(Run& run, Draw& draw) {
    const float not_finite[] = {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
    for (size_t batch : {3, 150})
        for (size_t places : {size_t{1}, size_t{5}, 27000 / batch})
            for (int kind = 0; kind < 5; ++kind) {
                Case<T> c(batch, 2, places, true, kind % 2, true, draw);
                for (size_t i = 0; i < c.x.size(); ++i)
                    if (kind < 3)  // numbers that bf16 has
                        c.x[i] = narrow<T>(kind == 0   ? 32768 + 256 * static_cast<float>(draw.below(9))
                                           : kind == 1 ? -65536.0f
                                                       : static_cast<float>(draw.below(9)));
                for (size_t channel = 0; channel < c.channels; ++channel) {
                    if (kind == 2) c.x[channel * places] = narrow<T>(4096);
                    if (kind > 2) c.x[((batch - 1) * c.channels + channel) * places] = narrow<T>(not_finite[kind - 3]);
                }
                compare(run, c);
            }
}

}  // namespace

CHECK(batch_norm) {
    batch_norm<float>(run, draw);
    batch_norm<bf16>(run, draw);
    odd_channels<float>(run, draw);
    odd_channels<bf16>(run, draw);
}
