// Sums over the rows of a matrix, column by column, on several threads and with bits that do not depend on them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "mpipipe/bf16.h"
#include "mpipipe/threads.h"

namespace mpipipe {

// Rows of a piece of work on a matrix (rows, d): enough that a thread is worth its start.
inline size_t rows_of_piece(size_t d) { return std::max<size_t>(1, 16384 / std::max<size_t>(1, d)); }

// One partial sum (d,) in float32 for each piece of rows, and their total in the order of the pieces. A piece sums
// blocks of rows apart before it adds them: a sum over n rows loses the digits of some 2 * sqrt(n) additions, not of n.
class ColumnSums {
  public:
    // At most 64 pieces, so that the partial sums stay small beside the matrix.
    ColumnSums(size_t rows, size_t d)
        : piece(std::max(rows_of_piece(d), (rows + 63) / 64)),
          d_(d),
          pieces_((rows + piece - 1) / piece),
          partial_(new float[2 * pieces_ * d]) {}

    const size_t piece;  // rows

    // body(first, last, sum) for the rows of the piece that begins at row `first`, block by block: it adds
    // them to sum (d,), which begins at 0.
    template <typename Body>
    void blocks(size_t first, size_t last, Body body) const {
        float* __restrict const whole = partial_.get() + 2 * (first / piece) * d_;
        float* __restrict const sum = whole + d_;
        std::fill_n(whole, d_, 0.0f);
        for (size_t at = first; at < last; at += kBlock) {
            std::fill_n(sum, d_, 0.0f);
            body(at, std::min(last, at + kBlock), sum);
#pragma omp simd
            for (size_t i = 0; i < d_; ++i) whole[i] += sum[i];
        }
    }

    // out[i] = total of column offset + i, for `columns` of them; nothing where `out` is null.
    template <typename T>
    void total(T* out, int threads, size_t columns, size_t offset) const {
        if (!out) return;
        parallel_pieces(columns, kColumns, threads, [&](size_t first, size_t last) {
            double sum[kColumns] = {};
            for (size_t p = 0; p < pieces_; ++p) {
                const float* partial = partial_.get() + 2 * p * d_ + offset + first;
#pragma omp simd
                for (size_t i = 0; i < last - first; ++i) sum[i] += partial[i];
            }
            for (size_t i = 0; i < last - first; ++i) out[first + i] = narrow<T>(static_cast<float>(sum[i]));
        });
    }

  private:
    static constexpr size_t kBlock = 16;  // rows
    static constexpr size_t kColumns = 512;
    size_t d_, pieces_;
    std::unique_ptr<float[]> partial_;
};

}  // namespace mpipipe
