// Gradient of a table that rows are looked up in, added to what is there: the bits of a dense gradient that is added.
//
//     dy       (n, d), contiguous: gradients of the rows that were looked up
//     indices  (n): which rows these are; look-ups of `padding`, -1 for none, are skipped
//     grad     (entries, d), contiguous:  grad[row] += 0 + dy[i] + dy[j] + ...   for all i < j < ... that look it up
//
// Each sum is made in that order and added once. Rows of grad that are not looked up are neither read nor written.
// Buffers do not overlap; no alignment asked, any sizes including 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mpipipe/cuda.h"

namespace mpipipe {

namespace reference {
bool embedding_backward(const float* dy, const int64_t* indices, size_t n, size_t d, int64_t padding, float* grad,
                        size_t entries, int threads);
}

// The same bits whatever `threads`. False, and nothing is written, where an index is outside of [0, entries). Memory:
// O(n), whatever `entries`.
namespace cpu {
bool embedding_backward(const float* dy, const int64_t* indices, size_t n, size_t d, int64_t padding, float* grad,
                        size_t entries, int threads);
}

// On a GPU: pointers to its memory, work in the order of `stream`. The look-ups come sorted by row, those of a row in
// their order, as torch sorts there: places[k] is the i of the k-th, rows[k] its index. An index that is outside fails
// an assertion on the GPU, as in torch's own look-up: false could only be returned by who waits for it. Memory: none.
namespace cuda {
void embedding_backward(const float* dy, const int64_t* rows, const int64_t* places, size_t n, size_t d,
                        int64_t padding, float* grad, size_t entries, CudaStream stream);
}

}  // namespace mpipipe
