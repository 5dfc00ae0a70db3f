// The meaning, one element after the other. Slow on purpose.
#include "mpipipe/embedding.h"

namespace mpipipe::reference {

template <typename T>
void embedding_backward(const T* dy, const int64_t* indices, size_t rows, size_t width, int64_t padding, T* gradient,
                        int) {
    for (size_t r = 0; r < rows; ++r) {
        if (indices[r] == padding) continue;
        for (size_t i = 0; i < width; ++i) {
            T& entry = gradient[static_cast<size_t>(indices[r]) * width + i];
            // the sum of two float32 in float64 is rounded once when it is narrowed
            entry = narrow<T>(static_cast<float>(double{wide(entry)} + double{wide(dy[r * width + i])}));
        }
    }
}

template void embedding_backward<float>(const float*, const int64_t*, size_t, size_t, int64_t, float*, int);
template void embedding_backward<bf16>(const bf16*, const int64_t*, size_t, size_t, int64_t, bf16*, int);

}  // namespace mpipipe::reference
