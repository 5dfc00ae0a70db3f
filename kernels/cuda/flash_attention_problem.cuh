// The arguments of attention as a kernel gets them: where tokens lie, and which keys a query sees.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "mpipipe/flash_attention.h"

namespace mpipipe::cuda {

// The tokens of one head of one sample: a matrix (rows, width).
template <typename T>
struct Rows {
    T* p;
    ptrdiff_t stride;
    size_t rows, width;
    __device__ T* at(size_t i) const { return p + static_cast<ptrdiff_t>(i) * stride; }
};

// A tensor (batch, heads, tokens, width).
template <typename T>
struct Tokens {
    T* p;
    ptrdiff_t of_sample, of_head, of_token;
    size_t tokens, width;

    Tokens(T* start, const Strides& s, size_t n, size_t e)
        : p(start), of_sample(s[0]), of_head(s[1]), of_token(s[2]), tokens(n), width(e) {}
    __device__ Rows<T> of(size_t b, size_t h) const {
        return {p + static_cast<ptrdiff_t>(b) * of_sample + static_cast<ptrdiff_t>(h) * of_head, of_token, tokens,
                width};
    }
};

struct Problem {
    size_t batch, heads, key_heads, queries, keys, width;
    bool causal;
    float scale;
    const int64_t* key_lengths;
    const bool* key_mask;

    __device__ size_t group() const { return heads / key_heads; }
    // Whether query i sees key j in sample b; nothing beyond the last one does.
    __device__ bool sees(size_t b, size_t i, size_t j) const {
        return i < queries && j < keys && !(causal && j > i) &&
               !(key_lengths && static_cast<int64_t>(j) >= key_lengths[b]) && !(key_mask && !key_mask[b * keys + j]);
    }
    // 2^(log2_scale() q . k) is the weight of a key before it is divided by their sum
    __device__ float log2_scale() const { return scale * 1.44269504f; }
};

// run(width): the smallest width of a tile that holds that of the problem, as a constant.
template <typename Run>
void with_width(size_t width, Run run) {
    if (width <= 32) return run(std::integral_constant<int, 32>());
    if (width <= 64) return run(std::integral_constant<int, 64>());
    if (width <= kMostWidth) return run(std::integral_constant<int, kMostWidth>());
    throw std::invalid_argument("flash_attention on a GPU: width " + std::to_string(width) + ", at most " +
                                std::to_string(kMostWidth) + " is served");
}

}  // namespace mpipipe::cuda
