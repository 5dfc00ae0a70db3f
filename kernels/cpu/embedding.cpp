// Each piece of the work has some entries of the table for its own and goes through all indices: whole rows are added
// one after the other, and no two pieces write to the same place.
#include "mpipipe/embedding.h"

#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr uint64_t kPieces = 16;  // entries are dealt out in turn: frequent ones are neighbours in many vocabularies

template <typename T>
void add_row(const T* dy, size_t n, T* gradient) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) gradient[i] = narrow<T>(wide(gradient[i]) + wide(dy[i]));
}

}  // namespace

template <typename T>
void embedding_backward(const T* dy, const int64_t* indices, size_t rows, size_t width, int64_t padding, T* gradient,
                        int threads) {
    parallel_for(kPieces, threads, [=](size_t piece) {
        for (size_t r = 0; r < rows; ++r) {
            const uint64_t entry = static_cast<uint64_t>(indices[r]);
            if (entry % kPieces != piece || indices[r] == padding) continue;
            add_row(dy + r * width, width, gradient + entry * width);
        }
    });
}

template void embedding_backward<float>(const float*, const int64_t*, size_t, size_t, int64_t, float*, int);
template void embedding_backward<bf16>(const bf16*, const int64_t*, size_t, size_t, int64_t, bf16*, int);

}  // namespace mpipipe::cpu
