// The largest number of each window of an image, and where in the window it is, in a byte: backward reads nothing else.
//
// Contract: x and dx are (planes, height, width), y, which and dy (planes, out_height, out_width), all contiguous.
// Window (i, j) has its first place at (i * stride_height - padding_height, j * stride_width - padding_width); of it
// counts what lies on the plane, which is one place at least. A window has 256 places at most. which: the place of y in
// its window, row by row; null: not wanted. What backward is told of places that are not on the plane, it leaves out.
// The bits are those of PyTorch on a processor: of equal numbers the first one is taken, of NaN the last one, and
// gradients of windows that overlap are added in the order of the windows, each sum rounded to T. T is float or bf16.
// No pointer that is written may overlap another one. planes may be 0. The bits do not depend on `threads`. Memory: a
// row of y for each thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "mpipipe/bf16.h"

namespace mpipipe {

// height and width: of x, of y, of the window, of the stride, of the padding
using Pooling = std::array<ptrdiff_t, 10>;

namespace reference {

template <typename T>
void max_pool2d(const T* x, T* y, uint8_t* which, size_t planes, Pooling sizes, int threads);
template <typename T>
void max_pool2d_backward(const T* dy, const uint8_t* which, T* dx, size_t planes, Pooling sizes, int threads);

}  // namespace reference

namespace cpu {

template <typename T>
void max_pool2d(const T* x, T* y, uint8_t* which, size_t planes, Pooling sizes, int threads);
template <typename T>
void max_pool2d_backward(const T* dy, const uint8_t* which, T* dx, size_t planes, Pooling sizes, int threads);

}  // namespace cpu
}  // namespace mpipipe
