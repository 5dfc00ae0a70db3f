// bfloat16 as it lies in memory: the high half of a float32.
#pragma once

#include <cstdint>
#include <cstring>

#include "mpipipe/cuda.h"

namespace mpipipe {

struct bf16 {
    uint16_t bits;
};

MPIPIPE_ANYWHERE inline float wide(bf16 x) {
    const uint32_t bits = uint32_t{x.bits} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
MPIPIPE_ANYWHERE inline float wide(float x) { return x; }
MPIPIPE_ANYWHERE inline double wide(double x) { return x; }

// To nearest, ties to even, as torch rounds; a NaN stays one. Branch-free: loops over it vectorise.
MPIPIPE_ANYWHERE inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(x != x ? 0x7FC0 : rounded)};
}

// `narrow<T>(x)`: x in the type of the tensor.
template <typename T>
MPIPIPE_ANYWHERE inline T narrow(float x) {
    return x;
}
template <>
MPIPIPE_ANYWHERE inline bf16 narrow<bf16>(float x) {
    return to_bf16(x);
}

}  // namespace mpipipe
