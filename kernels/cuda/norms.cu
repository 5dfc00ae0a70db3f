// Each parameter has the same number of partial sums, added in their order.
#include "mpipipe/norms.h"

#include "launch.cuh"

namespace mpipipe::cuda {
namespace {

constexpr unsigned kPieces = 64;

// sums[i, piece]: element k of a parameter belongs to thread k of kPieces blocks, in turn.
template <typename T>
__global__ void squares(const T* x, const int64_t* offsets, const int64_t* counts, size_t n, double* sums) {
    for (size_t i = blockIdx.y; i < n; i += gridDim.y) {
        const T* of = x + offsets[i];
        const size_t count = static_cast<size_t>(counts[i]);
        double sum = 0;
        for (size_t k = thread(); k < count; k += threads()) sum += double{wide(of[k])} * double{wide(of[k])};
        sum = over_block<Sum>(sum);
        if (threadIdx.x == 0) sums[i * kPieces + blockIdx.x] = sum;
    }
}

__global__ void roots(const double* sums, size_t n, double* out) {
    for (size_t i = thread(); i < n; i += threads()) {
        double sum = 0;
        for (unsigned piece = 0; piece < kPieces; ++piece) sum += sums[i * kPieces + piece];
        out[i] = sqrt(sum);
    }
}

}  // namespace

template <typename T>
void norms(const T* x, const int64_t* offsets, const int64_t* counts, size_t n, double* out, CudaStream stream) {
    const Workspace<double> sums(n * kPieces, stream);
    launch(squares<T>, dim3(kPieces, static_cast<unsigned>(std::min(n, kMostY))), stream, x, offsets, counts, n,
           sums.p);
    launch(roots, dim3(blocks_of_threads(n)), stream, sums.p, n, out);
}

template decltype(norms<float>) norms<float>;
template decltype(norms<bf16>) norms<bf16>;

}  // namespace mpipipe::cuda
