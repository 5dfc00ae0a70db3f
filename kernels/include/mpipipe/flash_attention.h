// Exact attention in tiles (Dao, Fu, Ermon, Rudra, Re: "FlashAttention", 2022): no array of queries x keys is kept.
//
//     o[b, h, i] = sum_j p[i, j] v[b, g, j]     p[i, :] = softmax_j(scale q[b, h, i] . k[b, g, j])     over the seen j
//
// q, o, dq   (batch, heads, queries, width)        head h reads the key head g = h / (heads / key_heads)
// k, v       (batch, key_heads, keys, width)
// lse        (batch, heads, queries) float32, contiguous: log2 of the sum over seen j of 2^(scale log2(e) q . k);
//            +inf for a query that sees no key. Only `flash_attention_backward` reads it.
//
// Query i sees key j where all of these hold that are asked for:
//     causal                j <= i (with queries != keys too)
//     key_lengths (batch,)  j < key_lengths[b]; a length is in [0, keys]
//     key_mask (batch, keys), contiguous    key_mask[b, j]
// A query that sees nothing gives 0. What is not seen may be read, and multiplied by 0: it should be finite.
//
// Strides count elements: batch, head, token; that of the last dimension is 1 and not read. T is float or bf16. Sums
// and exponentials are float32, and so are products, but those of bf16 where the processor has units for it: there p
// and its gradient are rounded to bf16 before they are multiplied, and denormal numbers are 0. lse is written even
// where no gradient is wanted. Outputs overlap neither inputs nor each other; key_lengths and key_mask may be null.
// heads is a multiple of key_heads; any size may be 0 but the width. The bits depend on sizes, strides and instruction
// set alone, never on `threads`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {

using Strides = std::array<ptrdiff_t, 4>;

namespace cpu {

// Beside its outputs it holds less than 3 (keys + 64) x width float32 per thread.
template <typename T>
void flash_attention(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides, Strides v_strides,
                     size_t batch, size_t heads, size_t key_heads, size_t queries, size_t keys, size_t width,
                     bool causal, float scale, const int64_t* key_lengths, const bool* key_mask, T* o,
                     Strides o_strides, float* lse, int threads);

// dq, dk, dv = gradients of sum(o * d_o) in q, k, v. o and lse are those that `flash_attention` made.
// Beside its outputs it holds some (queries + keys) x width x (heads / key_heads) float32 per thread.
template <typename T>
void flash_attention_backward(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides,
                              Strides v_strides, size_t batch, size_t heads, size_t key_heads, size_t queries,
                              size_t keys, size_t width, bool causal, float scale, const int64_t* key_lengths,
                              const bool* key_mask, const T* o, Strides o_strides, const float* lse, const T* d_o,
                              Strides d_o_strides, T* dq, Strides dq_strides, T* dk, Strides dk_strides, T* dv,
                              Strides dv_strides, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`. Widths up to kMostWidth; others throw.
// Products are made in float32, without tensor cores.
namespace cuda {

constexpr size_t kMostWidth = 128;

template <typename T>
void flash_attention(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides, Strides v_strides,
                     size_t batch, size_t heads, size_t key_heads, size_t queries, size_t keys, size_t width,
                     bool causal, float scale, const int64_t* key_lengths, const bool* key_mask, T* o,
                     Strides o_strides, float* lse, CudaStream stream);
template <typename T>
void flash_attention_backward(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides,
                              Strides v_strides, size_t batch, size_t heads, size_t key_heads, size_t queries,
                              size_t keys, size_t width, bool causal, float scale, const int64_t* key_lengths,
                              const bool* key_mask, const T* o, Strides o_strides, const float* lse, const T* d_o,
                              Strides d_o_strides, T* dq, Strides dq_strides, T* dk, Strides dk_strides, T* dv,
                              Strides dv_strides, CudaStream stream);

}  // namespace cuda

// The same in plain loops and in double; `threads` is not used.
namespace reference {

template <typename T>
void flash_attention(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides, Strides v_strides,
                     size_t batch, size_t heads, size_t key_heads, size_t queries, size_t keys, size_t width,
                     bool causal, float scale, const int64_t* key_lengths, const bool* key_mask, T* o,
                     Strides o_strides, float* lse, int threads);

template <typename T>
void flash_attention_backward(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides,
                              Strides v_strides, size_t batch, size_t heads, size_t key_heads, size_t queries,
                              size_t keys, size_t width, bool causal, float scale, const int64_t* key_lengths,
                              const bool* key_mask, const T* o, Strides o_strides, const float* lse, const T* d_o,
                              Strides d_o_strides, T* dq, Strides dq_strides, T* dk, Strides dk_strides, T* dv,
                              Strides dv_strides, int threads);

}  // namespace reference
}  // namespace mpipipe
