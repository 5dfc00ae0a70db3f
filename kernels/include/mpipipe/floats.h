// Arrays of float32 that begin where a line of the cache does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

namespace mpipipe::cpu {

struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Floats = std::unique_ptr<float[], Free>;

inline Floats floats(size_t n) {
    return Floats(static_cast<float*>(::operator new[](std::max<size_t>(n, 1) * sizeof(float), std::align_val_t{64})));
}

inline Floats zeros(size_t n) {
    Floats x = floats(n);
    std::fill_n(x.get(), n, 0.0f);
    return x;
}

}  // namespace mpipipe::cpu
