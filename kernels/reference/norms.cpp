// One sum in long double per parameter. Slow on purpose.
#include "mpipipe/norms.h"

#include <cmath>

namespace mpipipe::reference {

template <typename T>
void norms(const T* x, const int64_t* offsets, const int64_t* counts, size_t n, double* out, int) {
    for (size_t i = 0; i < n; ++i) {
        long double sum = 0;
        for (int64_t k = 0; k < counts[i]; ++k) {
            const long double value = wide(x[offsets[i] + k]);
            sum += value * value;
        }
        out[i] = static_cast<double>(std::sqrt(sum));
    }
}

template decltype(norms<float>) norms<float>;
template decltype(norms<bf16>) norms<bf16>;

}  // namespace mpipipe::reference
