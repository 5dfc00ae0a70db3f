// The meaning of the gate: the formula of the header, element by element, in double. Slow on purpose.
#include "mpipipe/swiglu.h"

#include <cmath>

namespace mpipipe::reference {

template <typename T>
void swiglu(const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* y, size_t rows, size_t d, int) {
    for (size_t r = 0; r < rows; ++r) {
        for (size_t i = 0; i < d; ++i) {
            const double g = wide(gate[r * gate_stride + i]), u = wide(up[r * up_stride + i]);
            y[r * d + i] = narrow<T>(static_cast<float>(g / (1 + std::exp(-g)) * u));
        }
    }
}

template <typename T>
void swiglu_backward(const T* dy, const T* gate, size_t gate_stride, const T* up, size_t up_stride, T* dgate, T* dup,
                     size_t rows, size_t d, int) {
    for (size_t r = 0; r < rows; ++r) {
        for (size_t i = 0; i < d; ++i) {
            const double g = wide(gate[r * gate_stride + i]), u = wide(up[r * up_stride + i]), dyi = wide(dy[r * d + i]);
            const double s = 1 / (1 + std::exp(-g));
            dup[r * d + i] = narrow<T>(static_cast<float>(dyi * g * s));
            dgate[r * d + i] = narrow<T>(static_cast<float>(dyi * u * (s + g * s * (1 - s))));
        }
    }
}

template decltype(swiglu<float>) swiglu<float>;
template decltype(swiglu<bf16>) swiglu<bf16>;
template decltype(swiglu_backward<float>) swiglu_backward<float>;
template decltype(swiglu_backward<bf16>) swiglu_backward<bf16>;

}  // namespace mpipipe::reference
