// The meaning of the stream, one block at a time, as the paper writes it. Slow on purpose.
#include "mpipipe/philox.h"

namespace mpipipe::reference {
namespace {

float scaled(float x, float scale) { return x * scale; }
double scaled(double x, double scale) { return x * scale; }
bf16 scaled(bf16 x, float scale) { return to_bf16(wide(x) * scale); }

}  // namespace

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c0;
        const uint64_t b = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9;  // the golden ratio: Weyl sequences keep the round keys apart
        k1 += 0xBB67AE85;  // sqrt(3) - 1
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

void words(Stream stream, uint64_t start, size_t n, uint32_t* out, int) {
    const uint32_t key[2] = {static_cast<uint32_t>(stream.key), static_cast<uint32_t>(stream.key >> 32)};
    for (size_t i = 0; i < n; ++i) {
        const uint64_t element = start + i, block = element / 4;
        const uint32_t counter[4] = {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                                     stream.step, stream.micro};
        uint32_t four[4];
        philox4x32(counter, key, four);
        out[i] = four[element % 4];
    }
}

template <typename T, typename Scale>
void dropout(Stream stream, uint64_t threshold, Scale scale, const T* x, T* y, size_t n, int) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t word;
        words(stream, i, 1, &word, 1);
        y[i] = word >= threshold ? scaled(x[i], scale) : T{};
    }
}

template decltype(dropout<float, float>) dropout<float, float>;
template decltype(dropout<double, double>) dropout<double, double>;
template decltype(dropout<bf16, float>) dropout<bf16, float>;

}  // namespace mpipipe::reference
