// bfloat16 as it lies in memory: the high half of a float32.
#pragma once

#include <cstdint>
#include <cstring>

namespace mpipipe {

struct bf16 {
    uint16_t bits;
};

inline float wide(bf16 x) {
    const uint32_t bits = uint32_t{x.bits} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline float wide(float x) { return x; }
inline double wide(double x) { return x; }

// To nearest, ties to even, as torch rounds; a NaN stays one. Branch-free: loops over it vectorise.
inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return {static_cast<uint16_t>(x != x ? 0x7FC0 : rounded)};
}

// `narrow<T>(x)`: x in the type of the tensor.
template <typename T>
inline T narrow(float x) {
    return x;
}
template <>
inline bf16 narrow<bf16>(float x) {
    return to_bf16(x);
}

}  // namespace mpipipe
