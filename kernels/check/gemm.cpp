#include "mpipipe/gemm.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

// A matrix as it is or transposed, with a gap between its rows.
struct Drawn {
    Drawn(Draw& draw, size_t rows, size_t columns, bool turned, size_t gap)
        : row(turned ? 1 : columns + gap), column(turned ? rows + gap : 1),
          values(draw.normal<float>(!rows || !columns ? 0 : (rows - 1) * row + (columns - 1) * column + 1)) {}
    size_t row, column;
    Buffer<float> values;
};

void one(Run& run, Draw& draw, size_t m, size_t n, size_t depth, bool a_turned, bool b_turned, size_t gap) {
    const Drawn a(draw, m, depth, a_turned, gap), b(draw, depth, n, b_turned, gap);
    const Buffer<float> bias = draw.normal<float>(n), c = draw.normal<float>(m && n ? (m - 1) * (n + gap) + n : 0);
    const std::string what = std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(depth);
    for (int way = 0; way < 3; ++way) {
        const bool add = way == 2;
        const float* offset = way == 1 ? bias.data() : nullptr;
        Buffer<float> got(c), other(c), want(c);
        const auto into = [&](auto kernel, Buffer<float>& to, int threads) {
            kernel(a.values.data(), a.row, a.column, b.values.data(), b.row, b.column, offset, to.data(), n + gap, m, n,
                   depth, add, threads);
        };
        into(cpu::gemm, got, 1);
        into(cpu::gemm, other, many);
        into(reference::gemm, want, 1);
        const char* const ways[] = {"product, ", "with bias, ", "added, "};
        run.close(ways[way] + what, got, want, 1e-6 * std::sqrt(static_cast<double>(depth) + 1), 1);
        run.same(ways[way] + what + ", threads", other, got);
    }
}

}  // namespace

CHECK(gemm) {
    const size_t some[] = {0, 1, 5, 6, 7, 16, 63, 64, 65, 130};
    for (size_t m : some)
        for (size_t n : some) one(run, draw, m, n, draw.below(80), draw.below(2), draw.below(2), draw.below(3));
    for (int turned = 0; turned < 4; ++turned)
        for (size_t depth : {size_t{0}, size_t{1}, size_t{383}, size_t{767}, size_t{768}, size_t{769}, size_t{1600}})
            one(run, draw, 13, 70, depth, turned & 1, turned & 2, 1);
    one(run, draw, 2100, 17, 10, false, true, 0);  // more rows than are packed at once
    one(run, draw, 1021, 33, 7, true, false, 0);
}
