// Product of matrices in float32 (Goto, van de Geijn: "Anatomy of High-Performance Matrix Multiplication", 2008).
//
//     c (m, n) = a (m, depth) b (depth, n) + bias (n)        or, with `add`,  c += a b
//
// Element (i, k) of a is a[i * a_row + k * a_column], of b (k, j) b[k * b_row + j * b_column]: of each, one of the two
// strides is 1, so that either may be given as it is or transposed. Row i of c begins at c[i * c_row], its elements lie
// side by side. Strides count elements. bias may be null, and is not read with `add`. c overlaps none of the others.
// Any size may be 0: with a depth of 0 a product is 0.
//
// Every element is one sum in the order of the depth, in equal parts that are added one after the other: its bits
// depend on the depth and the instruction set alone, neither on m, n and strides, nor on `threads`.
// Each thread keeps less than 4 MiB for parts of a and b as long as it lives, written as far as products need.
#pragma once

#include <cstddef>

namespace mpipipe {

namespace cpu {
void gemm(const float* a, size_t a_row, size_t a_column, const float* b, size_t b_row, size_t b_column,
          const float* bias, float* c, size_t c_row, size_t m, size_t n, size_t depth, bool add, int threads);
}

namespace reference {
void gemm(const float* a, size_t a_row, size_t a_column, const float* b, size_t b_row, size_t b_column,
          const float* bias, float* c, size_t c_row, size_t m, size_t n, size_t depth, bool add, int threads);
}

}  // namespace mpipipe
