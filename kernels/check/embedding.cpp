#include "mpipipe/embedding.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

void one(Run& run, Draw& draw, size_t n, size_t d, size_t entries, int64_t padding, bool wrong = false) {
    Buffer<float> dy = draw.normal<float>(n * d);
    Buffer<float> grad = draw.normal<float>(entries * d);
    Buffer<int64_t> indices(n);
    for (size_t i = 0; i < n; ++i) indices[i] = static_cast<int64_t>(draw.below(entries));
    if (d) grad[0] = -0.0f;
    if (n * d > 2) dy[0] = -0.0f, dy[n * d / 2] = NAN, dy[n * d - 1] = std::numeric_limits<float>::infinity();
    if (wrong) indices[draw.below(n)] = draw.below(2) ? static_cast<int64_t>(entries) : -1;
    const std::string what = std::to_string(n) + " of " + std::to_string(entries) + " x " + std::to_string(d);
    Buffer<float> got(grad), other(grad), want(grad);
    const double inside = wrong ? 0 : 1;
    Buffer<double> done(3), expected{inside, inside, inside};
    const auto into = [&](Buffer<float>& to, int threads) {
        return cpu::embedding_backward(dy.data(), indices.data(), n, d, padding, to.data(), entries, threads);
    };
    done[0] = into(got, 1);
    done[1] = into(other, many);
    done[2] = reference::embedding_backward(dy.data(), indices.data(), n, d, padding, want.data(), entries, 1);
    run.same(what + ", whether indices are inside", done, expected);
    run.same(what, got, want);
    run.same(what + ", threads", other, got);
    if (wrong) run.same(what + ", untouched", got, grad);
}

}  // namespace

CHECK(embedding) {
    for (size_t n : {0, 1, 2, 7, 64, 300})
        for (size_t d : {0, 1, 15, 64, 65, 1024, 1025})
            for (size_t entries : {1, 5, 40, 3000}) {
                one(run, draw, n, d, entries, draw.below(2) ? -1 : static_cast<int64_t>(draw.below(entries)));
                if (n && !on_gpu) one(run, draw, n, d, entries, -1, true);
            }
    one(run, draw, 3000, 33, 400, 7);  // several pieces of the threads, and far apart
    one(run, draw, 20, 5000, 12, -1);
}
