// Each element by itself, in float64. Slow on purpose.
#include "mpipipe/gemm.h"

namespace mpipipe::reference {

void gemm(const float* a, size_t a_row, size_t a_column, const float* b, size_t b_row, size_t b_column,
          const float* bias, float* c, size_t c_row, size_t m, size_t n, size_t depth, bool add, int) {
    for (size_t i = 0; i < m; ++i) {
        for (size_t j = 0; j < n; ++j) {
            double sum = add ? double{c[i * c_row + j]} : bias ? double{bias[j]} : 0.0;
            for (size_t k = 0; k < depth; ++k) {
                sum += double{a[i * a_row + k * a_column]} * double{b[k * b_row + j * b_column]};
            }
            c[i * c_row + j] = static_cast<float>(sum);
        }
    }
}

}  // namespace mpipipe::reference
