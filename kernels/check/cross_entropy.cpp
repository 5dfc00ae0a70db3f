#include "mpipipe/cross_entropy.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

constexpr int64_t ignored = -100;

// A vocabulary in two tiles, the second one shorter.
template <typename T>
struct Case {
    size_t rows, columns[2];
    Buffer<T> logits[2];
    Buffer<float> bias[2];
    Buffer<int64_t> labels;
    Buffer<float> log_sum;

    Case(size_t n, size_t vocabulary, Draw& draw)
        : rows(n), columns{vocabulary - vocabulary / 3, vocabulary / 3},
          logits{draw.normal<T>(n * columns[0], 5), draw.normal<T>(n * columns[1], 5)},
          bias{draw.normal<float>(columns[0]), draw.normal<float>(columns[1])}, labels(n), log_sum(n) {
        for (size_t r = 0; r < n; ++r) labels[r] = r % 5 == 3 ? ignored : static_cast<int64_t>(draw.below(vocabulary));
    }
    int64_t first(int tile) const { return tile ? static_cast<int64_t>(columns[0]) : 0; }

    template <typename Kernel>
    Buffer<double> forward(Kernel kernel, bool biased, int threads) const {
        Buffer<double> state(rows * 4);
        for (size_t i = 0; i < rows * 4; ++i) state[i] = std::numeric_limits<double>::quiet_NaN();  // read by none
        for (int tile : {0, 1})
            kernel(logits[tile].data(), rows, columns[tile], biased ? bias[tile].data() : nullptr, labels.data(),
                   first(tile), ignored, state.data(), threads);
        return state;
    }

    // log-sum-exp of the rows, then the loss, then whether all labels are known to be right
    template <typename Kernel>
    Buffer<float> loss(Kernel kernel, const Buffer<double>& state, double smoothing, int threads) const {
        Buffer<float> out(rows + 2);
        out[rows + 1] = kernel(state.data(), rows, labels.data(), static_cast<int64_t>(columns[0] + columns[1]),
                               ignored, smoothing, out.data(), out.data() + rows, threads);
        return out;
    }

    template <typename Kernel>
    Buffer<T> backward(Kernel kernel, bool biased, int tile, int threads) const {
        Buffer<T> gradient(logits[tile]);
        kernel(gradient.data(), rows, columns[tile], biased ? bias[tile].data() : nullptr, labels.data(), first(tile),
               ignored, log_sum.data(), 0.9f, 0.1f / static_cast<float>(columns[0] + columns[1]), 0.5f, threads);
        return gradient;
    }
};

// log-sum-exp, logit of the label and sum of the logits: what of a state does not depend on how it was found.
Buffer<double> meaning(const Buffer<double>& state, const Buffer<int64_t>& labels, size_t column) {
    Buffer<double> out(labels.size());
    for (size_t r = 0; r < labels.size(); ++r) {
        const double* row = state.data() + 4 * r;
        out[r] = labels[r] == ignored ? 0 : column == 0 ? row[0] + std::log(row[1]) : row[column + 1];
    }
    return out;
}

template <typename T>
void compare(Run& run, Case<T>& c, bool biased) {
    const std::string what = std::to_string(c.rows) + " x " + std::to_string(c.columns[0] + c.columns[1]);
    const auto got = c.forward(cpu::cross_entropy_forward<T>, biased, 1),
               threaded = c.forward(cpu::cross_entropy_forward<T>, biased, many),
               want = c.forward(reference::cross_entropy_forward<T>, biased, 1);
    const char* names[] = {"log-sum-exp, ", "logit of the label, ", "sum of the logits, "};
    for (size_t i = 0; i < 3; ++i)
        run.close(names[i] + what, meaning(got, c.labels, i), meaning(want, c.labels, i), 1e-5, 10);
    run.same("state on threads, " + what, threaded, got);
    for (double smoothing : {0.0, 0.1}) {
        const auto loss = c.loss(cpu::cross_entropy_loss, got, smoothing, 1);
        auto exact = c.loss(reference::cross_entropy_loss, got, smoothing, 1);
        if (on_gpu) exact[c.rows + 1] = false;
        run.close("loss, " + what, loss, exact, 1e-6);
        run.same("loss on threads, " + what, c.loss(cpu::cross_entropy_loss, got, smoothing, many), loss);
    }
    const auto log_sum = meaning(want, c.labels, 0);
    for (size_t r = 0; r < c.rows; ++r) c.log_sum[r] = static_cast<float>(log_sum[r]);
    for (int tile : {0, 1}) {
        const auto back = c.backward(cpu::cross_entropy_backward<T>, biased, tile, 1);
        run.close("gradient, " + what, back, c.backward(reference::cross_entropy_backward<T>, biased, tile, 1),
                  std::is_same_v<T, float> ? 1e-5 : 2 * rounding<bf16>(), 0.1);
        run.same("gradient on threads, " + what, c.backward(cpu::cross_entropy_backward<T>, biased, tile, many), back);
    }
}

template <typename T>
void cross_entropy(Run& run, Draw& draw) {
    for (size_t rows : {0, 1, 3, 40})
        for (size_t vocabulary : {1, 2, 17, 64, 100, 5003})
            for (bool biased : {false, true}) {
                Case<T> c(rows, vocabulary, draw);
                compare(run, c, biased);
            }
    for (int64_t wrong : {int64_t{-1}, int64_t{100}, std::numeric_limits<int64_t>::min(),
                          std::numeric_limits<int64_t>::max()}) {
        Case<T> c(40, 100, draw);
        c.labels[7] = wrong;
        compare(run, c, true);
    }
}

}  // namespace

CHECK(cross_entropy) {
    cross_entropy<float>(run, draw);
    cross_entropy<bf16>(run, draw);
}
