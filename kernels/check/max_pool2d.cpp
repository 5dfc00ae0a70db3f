#include "mpipipe/max_pool2d.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

template <typename T>
void one(Run& run, Draw& draw, size_t planes, Pooling sizes) {
    const auto [h, w, oh, ow, kh, kw, sh, sw, ph, pw] = sizes;
    const size_t in = planes * static_cast<size_t>(h * w), out = planes * static_cast<size_t>(oh * ow);
    Buffer<T> x = draw.normal<T>(in);
    const Buffer<T> dy = draw.normal<T>(out);
    for (size_t i = 0; i < in / 8; ++i) {  // equal ones, zeros of both signs, and what is no number
        const float odd[] = {0.0f, -0.0f, 1.0f, NAN, -INFINITY, INFINITY};
        x[draw.below(in)] = narrow<T>(odd[draw.below(6)]);
    }
    if (draw.below(4) == 0)
        for (size_t i = 0; i < in; ++i) x[i] = narrow<T>(-INFINITY);
    const std::string what = std::to_string(planes) + " x " + std::to_string(h) + " x " + std::to_string(w) + " by " +
                             std::to_string(kh) + " x " + std::to_string(kw) + ", stride " + std::to_string(sh) + " " +
                             std::to_string(sw) + ", padding " + std::to_string(ph) + " " + std::to_string(pw);
    Buffer<T> y(out), y_want(out), y_threads(out), y_alone(out), dx(in), dx_want(in), dx_threads(in);
    Buffer<uint8_t> which(out), which_want(out), which_threads(out);
    cpu::max_pool2d<T>(x.data(), y.data(), which.data(), planes, sizes, 1);
    cpu::max_pool2d<T>(x.data(), y_threads.data(), which_threads.data(), planes, sizes, many);
    cpu::max_pool2d<T>(x.data(), y_alone.data(), nullptr, planes, sizes, 1);
    reference::max_pool2d<T>(x.data(), y_want.data(), which_want.data(), planes, sizes, 1);
    run.close("y, " + what, y, y_want, 0);
    run.same("which, " + what, which, which_want);
    run.same("y on threads, " + what, y_threads, y);
    run.same("y alone, " + what, y_alone, y);
    run.same("which on threads, " + what, which_threads, which);
    cpu::max_pool2d_backward<T>(dy.data(), which.data(), dx.data(), planes, sizes, 1);
    cpu::max_pool2d_backward<T>(dy.data(), which.data(), dx_threads.data(), planes, sizes, many);
    reference::max_pool2d_backward<T>(dy.data(), which.data(), dx_want.data(), planes, sizes, 1);
    run.same("dx, " + what, dx, dx_want);
    run.same("dx on threads, " + what, dx_threads, dx);
}

}  // namespace

CHECK(max_pool2d) {
    const auto places = [](ptrdiff_t n, ptrdiff_t k, ptrdiff_t s, ptrdiff_t p) { return (n + 2 * p - k) / s + 1; };
    for (ptrdiff_t h : {1, 2, 5, 33})
        for (ptrdiff_t w : {1, 3, 16, 67})
            for (ptrdiff_t kh : {1, 2, 3})
                for (ptrdiff_t kw : {1, 2, 3, 5})
                    for (ptrdiff_t s : {1, 2, 3}) {
                        const ptrdiff_t ph = static_cast<ptrdiff_t>(draw.below(static_cast<size_t>(kh / 2 + 1)));
                        const ptrdiff_t pw = static_cast<ptrdiff_t>(draw.below(static_cast<size_t>(kw / 2 + 1)));
                        if (h + 2 * ph < kh || w + 2 * pw < kw) continue;
                        const Pooling sizes{h, w, places(h, kh, s, ph), places(w, kw, s, pw), kh, kw, s, s, ph, pw};
                        one<float>(run, draw, draw.below(4), sizes);
                        one<bf16>(run, draw, draw.below(4), sizes);
                    }
    one<float>(run, draw, 40, {64, 64, 32, 32, 2, 2, 2, 2, 0, 0});  // several pieces of the threads
    one<float>(run, draw, 2, {16, 16, 1, 1, 16, 16, 16, 16, 0, 0});
    one<float>(run, draw, 2, {5, 5, 3, 3, 2, 2, 2, 2, 0, 0});  // windows that go beyond the plane
}
