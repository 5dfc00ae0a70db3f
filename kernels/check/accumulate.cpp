#include "mpipipe/accumulate.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

CHECK(accumulate) {
    for (bool zero : {false, true})
        for (size_t n : sizes) {
            const Buffer<float> sum = draw.normal<float>(n);
            Buffer<bf16> x = draw.normal<bf16>(n, 10);
            if (n > 2) x[n / 2] = to_bf16(std::numeric_limits<float>::infinity()), x[n - 1] = to_bf16(NAN);
            Buffer<float> got(sum), want(sum);
            Buffer<bf16> got_x(x), want_x(x);
            cpu::accumulate(got.data(), got_x.data(), n, zero, many);
            reference::accumulate(want.data(), want_x.data(), n, zero, 1);
            const std::string what = "n = " + std::to_string(n) + (zero ? ", zero" : "");
            run.close("sum, " + what, got, want, 0);
            run.same("x, " + what, got_x, want_x);
        }
}
