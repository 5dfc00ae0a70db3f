// A block for some columns of each row that is looked up: it goes through the run of look-ups that the row has.
#include "mpipipe/embedding.h"

#include <cassert>

#include "launch.cuh"

namespace mpipipe::cuda {
namespace {

__global__ void add(const float* dy, const int64_t* rows, const int64_t* places, size_t n, size_t d, int64_t padding,
                    float* grad, size_t entries) {
    for (size_t first = blockIdx.y; first < n; first += gridDim.y) {
        const int64_t row = rows[first];
        assert(static_cast<uint64_t>(row) < entries);
        if (row == padding || (first && rows[first - 1] == row)) continue;
        size_t end = first + 1;  // found before the sums, whose loads need not wait for comparisons then
        while (end < n && rows[end] == row) ++end;
        for (size_t c = thread(); c < d; c += threads()) {
            float sum = 0;
            for (size_t k = first; k < end; ++k) sum += dy[static_cast<size_t>(places[k]) * d + c];
            grad[static_cast<size_t>(row) * d + c] += sum;
        }
    }
}

}  // namespace

void embedding_backward(const float* dy, const int64_t* rows, const int64_t* places, size_t n, size_t d,
                        int64_t padding, float* grad, size_t entries, CudaStream stream) {
    launch(add, dim3(blocks_of_threads(d), static_cast<unsigned>(std::min(n, kMostY))), stream, dy, rows, places, n, d,
           padding, grad, entries);
}

}  // namespace mpipipe::cuda
