#include "mpipipe/swiglu.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

// gate and up are the halves of one matrix.
template <typename T>
void swiglu(Run& run, Draw& draw) {
    const double bound = std::is_same_v<T, float> ? 1e-5 : 2 * rounding<bf16>();
    for (size_t rows : {0, 1, 2, 33, 200})
        for (size_t d : {0, 1, 3, 16, 33, 65, 300}) {
            const size_t n = rows * d;
            const Buffer<T> both = draw.normal<T>(2 * n, 3), dy = draw.normal<T>(n);
            const T *gate = both.data(), *up = both.data() + d;
            Buffer<T> y(n), y_want(n), y_threads(n);
            cpu::swiglu<T>(gate, 2 * d, up, 2 * d, y.data(), rows, d, 1);
            cpu::swiglu<T>(gate, 2 * d, up, 2 * d, y_threads.data(), rows, d, many);
            reference::swiglu<T>(gate, 2 * d, up, 2 * d, y_want.data(), rows, d, 1);
            Buffer<T> dgate(n), dgate_want(n), dgate_threads(n), dup(n), dup_want(n), dup_threads(n);
            cpu::swiglu_backward<T>(dy.data(), gate, 2 * d, up, 2 * d, dgate.data(), dup.data(), rows, d, 1);
            cpu::swiglu_backward<T>(dy.data(), gate, 2 * d, up, 2 * d, dgate_threads.data(), dup_threads.data(), rows,
                                    d, many);
            reference::swiglu_backward<T>(dy.data(), gate, 2 * d, up, 2 * d, dgate_want.data(), dup_want.data(), rows,
                                          d, 1);
            const std::string what = std::to_string(rows) + " x " + std::to_string(d);
            run.close("y, " + what, y, y_want, bound, 1);
            run.close("dgate, " + what, dgate, dgate_want, bound, 1);
            run.close("dup, " + what, dup, dup_want, bound, 1);
            run.same("y on threads, " + what, y_threads, y);
            run.same("dgate on threads, " + what, dgate_threads, dgate);
            run.same("dup on threads, " + what, dup_threads, dup);
        }
}

}  // namespace

CHECK(swiglu) {
    swiglu<float>(run, draw);
    swiglu<bf16>(run, draw);
}
