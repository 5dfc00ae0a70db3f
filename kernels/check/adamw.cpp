#include "mpipipe/adamw.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

template <typename T>
struct State {
    Buffer<T> param, grad;
    Buffer<float> m, v, master;

    State(size_t n, Draw& draw)
        : param(n), grad(draw.normal<T>(n)), m(draw.normal<float>(n, 0.1)), v(n), master(draw.normal<float>(n)) {
        for (size_t i = 0; i < n; ++i) param[i] = narrow<T>(master[i]), v[i] = static_cast<float>(draw.uniform());
    }

    template <typename Kernel>
    void update(Kernel kernel, int64_t step, int threads) {
        float* const w = std::is_same_v<T, float> ? nullptr : master.data();
        kernel(param.data(), grad.data(), m.data(), v.data(), w, m.size(), 0.7, 1e-3, 0.9, 0.95, 1e-8, 0.1, step,
               threads);
    }
};

template <typename T>
void adamw(Run& run, Draw& draw) {
    for (int64_t step : {1, 2, 100000})
        for (size_t n : sizes) {
            const State<T> start(n, draw);
            State<T> got(start), threaded(start), want(start);
            got.update(cpu::adamw<T>, step, 1);
            threaded.update(cpu::adamw<T>, step, many);
            want.update(reference::adamw<T>, step, 1);
            const std::string what = "n = " + std::to_string(n) + ", step " + std::to_string(step);
            run.close("m, " + what, got.m, want.m, 4 * rounding<float>(), 0.5);
            run.close("v, " + what, got.v, want.v, 4 * rounding<float>(), 0.5);
            run.close("master, " + what, got.master, want.master, 4 * rounding<float>(), 1);
            run.close("param, " + what, got.param, want.param, 4 * rounding<T>(), 1);
            run.same("grad, " + what, got.grad, want.grad);
            run.same("param on threads, " + what, threaded.param, got.param);
            run.same("m on threads, " + what, threaded.m, got.m);
            run.same("v on threads, " + what, threaded.v, got.v);
        }
}

}  // namespace

CHECK(adamw) {
    adamw<float>(run, draw);
    adamw<bf16>(run, draw);
}
