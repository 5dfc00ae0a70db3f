// Sums over the rows of a matrix, column by column: pieces of rows apart, then the pieces in their order.
#pragma once

#include "launch.cuh"

namespace mpipipe::cuda {

// partial[piece, c] = sum of value(r, c) over the rows of a piece, in double; null: value is called alone.
template <typename Value>
__global__ void sum_pieces(Value value, size_t rows, size_t d, size_t rows_of_piece, double* partial) {
    const size_t first = blockIdx.y * rows_of_piece, end = first + rows_of_piece, last = end < rows ? end : rows;
    for (size_t c = thread(); c < d; c += threads()) {
        double sum = 0;
        for (size_t r = first; r < last; ++r) sum += value(r, c);
        if (partial) partial[blockIdx.y * d + c] = sum;
    }
}

template <typename T>
__global__ void sum_of_pieces(const double* partial, size_t pieces, size_t d, T* out) {
    for (size_t c = thread(); c < d; c += threads()) {
        double sum = 0;
        for (size_t piece = 0; piece < pieces; ++piece) sum += partial[piece * d + c];
        out[c] = narrow<T>(static_cast<float>(sum));
    }
}

// out[c] = sum over r of value(r, c), which is called once for each element, also where `out` is null.
template <typename Value, typename T>
void sum_rows(Value value, size_t rows, size_t d, T* out, CudaStream stream) {
    constexpr size_t kFewestRows = 32, kMostPieces = 256;
    const size_t rows_of_piece = std::max(kFewestRows, (rows + kMostPieces - 1) / kMostPieces);
    const size_t pieces = (rows + rows_of_piece - 1) / rows_of_piece;
    const Workspace<double> partial(out ? pieces * d : 0, stream);
    launch(sum_pieces<Value>, dim3(blocks_of_threads(d), static_cast<unsigned>(pieces)), stream, value, rows, d,
           rows_of_piece, out ? partial.p : nullptr);
    if (out) launch(sum_of_pieces<T>, dim3(blocks_of_threads(d)), stream, partial.p, pieces, d, out);
}

}  // namespace mpipipe::cuda
