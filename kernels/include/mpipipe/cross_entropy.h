// Cross entropy of a vocabulary that is seen tile by tile: log-sum-exp online, the loss, then the gradient in place.
//
// Online normaliser: Milakov and Gimelshein 2018; over tiles of a vocabulary: Wijmans et al. 2024.
//
//     logits  (rows, columns), contiguous: tokens x a tile of the vocabulary that begins at entry `first`
//     bias    (columns), added to every row; may be absent
//     labels  (rows), of the whole vocabulary; a row whose label is `ignored` is skipped. Any other number is the label
//             of no column
//     state   (rows, 4): largest logit, sum of exp(logit - largest), logit of the label, sum of the logits.
//             The tile that begins at entry 0 comes first and finds nothing in it, the others in any one order
//
// The log-sum-exp of a row is state[0] + log(state[1]). A NaN or +infinity among the logits of a row makes its
// sum NaN, -infinity is a logit of probability 0. T is float or bf16; all is computed in float32, sums of
// blocks in float64. Inputs and outputs do not overlap. Any rows and columns including 0; no alignment asked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mpipipe/bf16.h"
#include "mpipipe/cuda.h"

namespace mpipipe {

// Where a label is in the tile that begins at entry `first`: beyond all columns if it is not there.
MPIPIPE_ANYWHERE inline size_t column(int64_t label, int64_t first) {
    return static_cast<size_t>(label) - static_cast<size_t>(first);
}

namespace reference {

template <typename T>
void cross_entropy_forward(const T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                           int64_t first, int64_t ignored, double* state, int threads);
bool cross_entropy_loss(const double* state, size_t rows, const int64_t* labels, int64_t entries, int64_t ignored,
                        double smoothing, float* log_sum, float* loss, int threads);
template <typename T>
void cross_entropy_backward(T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                            int64_t first, int64_t ignored, const float* log_sum, float on_label, float on_all,
                            float scale, int threads);

}  // namespace reference

namespace cpu {

// Adds a tile to `state`.
template <typename T>
void cross_entropy_forward(const T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                           int64_t first, int64_t ignored, double* state, int threads);

// After the last tile of a vocabulary of `entries`: the log-sum-exp of each row, (rows), 0 for an ignored one, and the
// sum of the losses, made in the order of the rows. With `smoothing` e a row's loss is its log-sum-exp - (1 - e) logit
// of the label - e / entries sum of the logits. Returns whether it knows that each label is one of the entries or
// ignored; if one is not, the loss says nothing.
bool cross_entropy_loss(const double* state, size_t rows, const int64_t* labels, int64_t entries, int64_t ignored,
                        double smoothing, float* log_sum, float* loss, int threads);

// logits[r, c] becomes scale * (exp(logits[r, c] + bias[c] - log_sum[r]) - on_all - [first + c is the label]
// on_label), 0 in ignored rows. With label smoothing e over V entries on_label is 1 - e and on_all e / V.
// log_sum: (rows), float32.
template <typename T>
void cross_entropy_backward(T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                            int64_t first, int64_t ignored, const float* log_sum, float on_label, float on_all,
                            float scale, int threads);

}  // namespace cpu

// On a GPU: pointers to its memory, work in the order of `stream`. So nothing is known of the labels: it returns false.
namespace cuda {

template <typename T>
void cross_entropy_forward(const T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                           int64_t first, int64_t ignored, double* state, CudaStream stream);
bool cross_entropy_loss(const double* state, size_t rows, const int64_t* labels, int64_t entries, int64_t ignored,
                        double smoothing, float* log_sum, float* loss, CudaStream stream);
template <typename T>
void cross_entropy_backward(T* logits, size_t rows, size_t columns, const float* bias, const int64_t* labels,
                            int64_t first, int64_t ignored, const float* log_sum, float on_label, float on_all,
                            float scale, CudaStream stream);

}  // namespace cuda
}  // namespace mpipipe
