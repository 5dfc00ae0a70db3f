#include "mpipipe/accumulate.h"

#include <algorithm>

#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kPiece = 1 << 14;  // elements; those of x are zeroed while they are in the cache

template <bool zero>
void add(float* __restrict sum, bf16* __restrict x, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) sum[i] += wide(x[i]);
    if (zero) std::fill_n(x, n, bf16{});
}

}  // namespace

void accumulate(float* sum, bf16* x, size_t n, bool zero, int threads) {
    const auto kernel = zero ? add<true> : add<false>;
    parallel_pieces(n, kPiece, threads,
                    [=](size_t first, size_t last) { kernel(sum + first, x + first, last - first); });
}

}  // namespace mpipipe::cpu
