#include "mpipipe/bias_gelu.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

template <typename T, typename B>
void bias_gelu(Run& run, Draw& draw) {
    const double bound = std::is_same_v<T, float> ? 1e-5 : 2 * rounding<bf16>();
    for (size_t rows : {0, 1, 2, 33, 200})
        for (size_t d : {0, 1, 3, 16, 33, 65, 300})
            for (bool tanh : {false, true}) {
                const Buffer<T> x = draw.normal<T>(rows * d, 3), dy = draw.normal<T>(rows * d);
                const Buffer<B> bias = draw.normal<B>(d);
                const B* b = rows == 2 ? nullptr : bias.data();
                Buffer<T> y(x.size()), y_want(x.size()), y_threads(x.size());
                cpu::bias_gelu<T, B>(x.data(), b, tanh, y.data(), rows, d, 1);
                cpu::bias_gelu<T, B>(x.data(), b, tanh, y_threads.data(), rows, d, many);
                reference::bias_gelu<T, B>(x.data(), b, tanh, y_want.data(), rows, d, 1);
                Buffer<T> dx(x.size()), dx_want(x.size()), dx_threads(x.size());
                Buffer<B> dbias(d), dbias_want(d), dbias_threads(d);
                cpu::bias_gelu_backward<T, B>(dy.data(), x.data(), b, tanh, dx.data(), dbias.data(), rows, d, 1);
                cpu::bias_gelu_backward<T, B>(dy.data(), x.data(), b, tanh, dx_threads.data(), dbias_threads.data(),
                                              rows, d, many);
                reference::bias_gelu_backward<T, B>(dy.data(), x.data(), b, tanh, dx_want.data(), dbias_want.data(),
                                                    rows, d, 1);
                const std::string what = std::to_string(rows) + " x " + std::to_string(d) + (tanh ? ", tanh" : "");
                run.close("y, " + what, y, y_want, bound, 1);
                run.close("dx, " + what, dx, dx_want, bound, 1);
                run.close("dbias, " + what, dbias, dbias_want, bound, 1);
                run.same("y on threads, " + what, y_threads, y);
                run.same("dx on threads, " + what, dx_threads, dx);
                run.same("dbias on threads, " + what, dbias_threads, dbias);
            }
}

}  // namespace

CHECK(bias_gelu) {
    bias_gelu<float, float>(run, draw);
    bias_gelu<bf16, bf16>(run, draw);
    bias_gelu<bf16, float>(run, draw);
}
