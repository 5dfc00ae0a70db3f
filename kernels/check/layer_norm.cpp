#include "mpipipe/layer_norm.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

template <typename T, typename R>
struct Case {
    size_t rows, d;
    bool plain;  // neither residual, weight nor bias; no gradient but dx is wanted
    Buffer<T> x;
    Buffer<R> residual;
    Buffer<T> weight, bias, dy, ds;

    Case(size_t n, size_t width, bool is_plain, Draw& draw)
        : rows(n), d(width), plain(is_plain), x(draw.normal<T>(n * d, 3)), residual(draw.normal<R>(n * d)),
          weight(draw.normal<T>(d)), bias(draw.normal<T>(d)), dy(draw.normal<T>(n * d)), ds(draw.normal<T>(n * d)) {}

    template <typename U>
    U* unless_plain(U* p) const {
        return plain ? nullptr : p;
    }
};

template <typename T, typename R>
struct Forward {
    Buffer<T> s, y;
    Buffer<float> mean, rstd;

    Forward(const Case<T, R>& c) : s(c.x), y(c.x.size()), mean(c.rows), rstd(c.rows) {}
    template <typename Kernel>
    void layer(Kernel kernel, const Case<T, R>& c, int threads) {
        kernel(c.x.data(), c.unless_plain(c.residual.data()), c.unless_plain(c.weight.data()),
               c.unless_plain(c.bias.data()), 1e-5f, c.unless_plain(s.data()), y.data(), mean.data(), rstd.data(),
               c.rows, c.d, threads);
    }
    template <typename Kernel>
    void rms(Kernel kernel, const Case<T, R>& c, int threads) {
        kernel(c.x.data(), c.unless_plain(c.residual.data()), c.unless_plain(c.weight.data()), 1e-5f,
               c.unless_plain(s.data()), y.data(), rstd.data(), c.rows, c.d, threads);
    }
};

template <typename T, typename R>
struct Backward {
    Buffer<T> dx, dweight, dbias;
    Buffer<R> dresidual;

    Backward(const Case<T, R>& c) : dx(c.x.size()), dweight(c.d), dbias(c.d), dresidual(c.x.size()) {}
    template <typename Kernel>
    void layer(Kernel kernel, const Case<T, R>& c, const Forward<T, R>& f, int threads) {
        kernel(c.dy.data(), c.unless_plain(c.ds.data()), f.s.data(), c.unless_plain(c.weight.data()), f.mean.data(),
               f.rstd.data(), dx.data(), c.unless_plain(dresidual.data()), c.unless_plain(dweight.data()),
               c.unless_plain(dbias.data()), c.rows, c.d, threads);
    }
    template <typename Kernel>
    void rms(Kernel kernel, const Case<T, R>& c, const Forward<T, R>& f, int threads) {
        kernel(c.dy.data(), c.unless_plain(c.ds.data()), f.s.data(), c.unless_plain(c.weight.data()), f.rstd.data(),
               dx.data(), c.unless_plain(dresidual.data()), c.unless_plain(dweight.data()), c.rows, c.d, threads);
    }
};

template <typename T, typename R>
void agree(Run& run, const std::string& what, const Forward<T, R>& got, const Forward<T, R>& threaded,
           const Forward<T, R>& want) {
    const double bound = std::is_same_v<T, float> ? 1e-5 : 2 * rounding<bf16>();
    run.same("s, " + what, got.s, want.s);
    if (got.y.size()) {  // nothing has no mean
        run.close("mean, " + what, got.mean, want.mean, 1e-5, 1);
        run.close("rstd, " + what, got.rstd, want.rstd, 1e-5);
    }
    run.close("y, " + what, got.y, want.y, bound, 0.1);
    run.same("y on threads, " + what, threaded.y, got.y);
}

template <typename T, typename R>
void agree(Run& run, const std::string& what, const Backward<T, R>& got, const Backward<T, R>& threaded,
           const Backward<T, R>& want) {
    const double bound = std::is_same_v<T, float> ? 2e-5 : 2 * rounding<bf16>();
    run.close("dx, " + what, got.dx, want.dx, bound, 1);
    run.close("dresidual, " + what, got.dresidual, want.dresidual, 2 * rounding<R>() + bound, 1);
    run.close("dweight, " + what, got.dweight, want.dweight, bound, 1);
    run.close("dbias, " + what, got.dbias, want.dbias, bound, 1);
    run.same("dx on threads, " + what, threaded.dx, got.dx);
    run.same("dresidual on threads, " + what, threaded.dresidual, got.dresidual);
    run.same("dweight on threads, " + what, threaded.dweight, got.dweight);
    run.same("dbias on threads, " + what, threaded.dbias, got.dbias);
}

template <typename T, typename R>
void compare(Run& run, const Case<T, R>& c) {
    const std::string what =
        std::to_string(c.rows) + " x " + std::to_string(c.d) + (c.plain ? ", plain" : ", with a residual");
    Forward<T, R> got(c), threaded(c), want(c);
    Backward<T, R> got_back(c), threaded_back(c), want_back(c);
    got.layer(cpu::layer_norm<T, R>, c, 1), threaded.layer(cpu::layer_norm<T, R>, c, many);
    want.layer(reference::layer_norm<T, R>, c, 1);
    agree(run, "layer norm, " + what, got, threaded, want);
    got_back.layer(cpu::layer_norm_backward<T, R>, c, want, 1);
    threaded_back.layer(cpu::layer_norm_backward<T, R>, c, want, many);
    want_back.layer(reference::layer_norm_backward<T, R>, c, want, 1);
    agree(run, "layer norm, " + what, got_back, threaded_back, want_back);
    got.rms(cpu::rms_norm<T, R>, c, 1), threaded.rms(cpu::rms_norm<T, R>, c, many);
    want.rms(reference::rms_norm<T, R>, c, 1);
    agree(run, "RMS norm, " + what, got, threaded, want);
    got_back.rms(cpu::rms_norm_backward<T, R>, c, want, 1);
    threaded_back.rms(cpu::rms_norm_backward<T, R>, c, want, many);
    want_back.rms(reference::rms_norm_backward<T, R>, c, want, 1);
    agree(run, "RMS norm, " + what, got_back, threaded_back, want_back);
}

template <typename T, typename R>
void norm(Run& run, Draw& draw) {
    for (size_t rows : {0, 1, 2, 33, 200})
        for (size_t d : {0, 2, 3, 16, 33, 65, 768})
            for (bool plain : {false, true})
                if (!plain || std::is_same_v<T, R>) compare(run, Case<T, R>(rows, d, plain, draw));
}

}  // namespace

CHECK(norm) {
    norm<float, float>(run, draw);
    norm<bf16, bf16>(run, draw);
    norm<float, bf16>(run, draw);
}
