// The kernel for GPUs with the arguments of the processor's: the look-ups are sorted first, as mpipipe/ops/embedding.py
// has them. None is outside of the table: the kernel would end the program.
#include "mpipipe/embedding.h"

#include <algorithm>
#include <numeric>

#include "../check.h"

namespace mpipipe::cuda {

bool embedding_backward(const float* dy, const int64_t* indices, size_t n, size_t d, int64_t padding, float* grad,
                        size_t entries, int threads) {
    check::Buffer<int64_t> rows(n), places(n);
    std::iota(places.data(), places.data() + n, 0);
    std::stable_sort(places.data(), places.data() + n, [=](int64_t i, int64_t j) { return indices[i] < indices[j]; });
    std::transform(places.data(), places.data() + n, rows.data(), [=](int64_t i) { return indices[i]; });
    embedding_backward(dy, rows.data(), places.data(), n, d, padding, grad, entries, CudaStream{threads});
    return true;
}

}  // namespace mpipipe::cuda
