#include "mpipipe/norms.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

// One parameter of each of `sizes`, with a gap after each; then the same again in another order.
template <typename T>
void norms(Run& run, Draw& draw, double scale) {
    const size_t n = std::size(sizes);
    Buffer<int64_t> counts(n), offsets(n), backward_counts(n), backward_offsets(n);
    int64_t end = 0;
    for (size_t i = 0; i < n; ++i) {
        counts[i] = static_cast<int64_t>(sizes[i]), offsets[i] = end;
        end += counts[i] + (i + 1 < n);  // the last one ends with the buffer
        backward_counts[n - 1 - i] = counts[i], backward_offsets[n - 1 - i] = offsets[i];
    }
    const Buffer<T> x = draw.normal<T>(static_cast<size_t>(end), scale);
    Buffer<double> got(n), want(n), backward(n), turned(n);
    cpu::norms<T>(x.data(), offsets.data(), counts.data(), n, got.data(), 1);
    cpu::norms<T>(x.data(), backward_offsets.data(), backward_counts.data(), n, backward.data(), many);
    reference::norms<T>(x.data(), offsets.data(), counts.data(), n, want.data(), 1);
    for (size_t i = 0; i < n; ++i) turned[i] = backward[n - 1 - i];
    run.close("norms", got, want, 1e-14);
    run.same("backwards on threads", turned, got);
}

}  // namespace

CHECK(norms) {
    for (double scale : {1.0, 1e-30, 1e30}) {
        norms<float>(run, draw, scale);
        norms<bf16>(run, draw, scale);
    }
    cpu::norms<float>(nullptr, nullptr, nullptr, 0, nullptr, 1);
}
