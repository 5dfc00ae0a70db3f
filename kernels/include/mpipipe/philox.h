// The random stream of the project: what every kernel that draws numbers must produce.
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
// A stream is named by (key, step, micro). Its element i is word i % 4 of block i / 4, and block b is
// the cipher of one counter under one key:
//
//     counter  c0 = low half of b   c1 = high half of b   c2 = step   c3 = micro-batch
//     key      k0 = low half of key                       k1 = high half of key
//
// So any slice of a stream can be made alone, in any order, by any number of ranks. The stream is final:
// a faster kernel must give the same words (tests/ops compares each one with `reference`).
//
// Contract of every function here: plain pointers, no alignment asked, no allocation, no exception,
// any n including 0. Outputs do not overlap inputs, except where `dropout` says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {

struct Stream {
    uint64_t key;
    uint32_t step;
    uint32_t micro;
};

namespace reference {

// The cipher itself: out = Philox4x32-10(counter, key).
void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

// out[i] = element start + i of the stream.
void words(Stream stream, uint64_t start, size_t n, uint32_t* out, int threads);

// As below.
template <typename T, typename Scale>
void dropout(Stream stream, uint64_t threshold, Scale scale, const T* x, T* y, size_t n, int threads);

}  // namespace reference

namespace cpu {

void words(Stream stream, uint64_t start, size_t n, uint32_t* out, int threads);

// y[i] = x[i] * scale where element i of the stream is at least `threshold`, else 0 (also where x[i] is
// not finite). bf16 is multiplied in float32 and rounded to nearest, ties to even. `threshold` is
// round(p * 2^32), hence the 33 bits. y may be x.
template <typename T, typename Scale>
void dropout(Stream stream, uint64_t threshold, Scale scale, const T* x, T* y, size_t n, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `queue`.
namespace cuda {

template <typename T, typename Scale>
void dropout(Stream stream, uint64_t threshold, Scale scale, const T* x, T* y, size_t n, CudaStream queue);

}  // namespace cuda
}  // namespace mpipipe
