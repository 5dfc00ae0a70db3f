// One addition at a time, in double and then rounded: for a sum of two numbers that is float32's own rounding.
#include "mpipipe/accumulate.h"

namespace mpipipe::reference {

void accumulate(float* sum, bf16* x, size_t n, bool zero, int) {
    for (size_t i = 0; i < n; ++i) {
        sum[i] = static_cast<float>(double{sum[i]} + wide(x[i]));
        if (zero) x[i] = bf16{};
    }
}

}  // namespace mpipipe::reference
