// The gradient of a table of rows, added where it is kept: no dense gradient is made.
//
//     dy        (rows, width), contiguous: gradient of the rows that were looked up
//     indices   (rows), each in [0, entries of the table)
//     gradient  (entries of the table, width), contiguous; does not overlap dy
//
// For r = 0, 1, ...: gradient[indices[r]] += dy[r], but where indices[r] is `padding` (-1: nowhere). Several rows of
// one entry are added in the order of r, for any number of threads. T is float or bf16; a bf16 sum is rounded after
// each row. Any rows and width including 0; no alignment asked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mpipipe/bf16.h"

namespace mpipipe {

namespace reference {

template <typename T>
void embedding_backward(const T* dy, const int64_t* indices, size_t rows, size_t width, int64_t padding, T* gradient,
                        int threads);

}  // namespace reference

namespace cpu {

template <typename T>
void embedding_backward(const T* dy, const int64_t* indices, size_t rows, size_t width, int64_t padding, T* gradient,
                        int threads);

}  // namespace cpu
}  // namespace mpipipe
