// The look-ups of a row one after the other, each addition in double and then rounded, which is float32's own rounding.
#include "mpipipe/embedding.h"

#include <algorithm>

namespace mpipipe::reference {

bool embedding_backward(const float* dy, const int64_t* indices, size_t n, size_t d, int64_t padding, float* grad,
                        size_t entries, int) {
    const auto outside = [=](int64_t index) { return index < 0 || static_cast<size_t>(index) >= entries; };
    if (std::any_of(indices, indices + n, outside)) return false;
    for (size_t i = 0; i < n; ++i) {
        if (indices[i] == padding || std::count(indices, indices + i, indices[i])) continue;
        for (size_t j = 0; j < d; ++j) {
            float sum = 0;
            for (size_t k = i; k < n; ++k)
                if (indices[k] == indices[i]) sum = static_cast<float>(double{sum} + dy[k * d + j]);
            float& total = grad[static_cast<size_t>(indices[i]) * d + j];
            total = static_cast<float>(double{total} + sum);
        }
    }
    return true;
}

}  // namespace mpipipe::reference
