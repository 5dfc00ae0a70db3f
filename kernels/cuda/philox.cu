// A thread ciphers a block of the stream and drops or keeps an element by each of its four words.
#include "mpipipe/philox.h"

#include "launch.cuh"

namespace mpipipe::cuda {
namespace {

struct Words {
    uint32_t of[4];
};

__device__ Words cipher(Stream stream, uint64_t block) {
    uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = stream.step;
    uint32_t c3 = stream.micro, k0 = static_cast<uint32_t>(stream.key), k1 = static_cast<uint32_t>(stream.key >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(a);
    }
    return {{c0, c1, c2, c3}};
}

__device__ inline float kept(float x, float scale) { return x * scale; }
__device__ inline double kept(double x, double scale) { return x * scale; }
__device__ inline bf16 kept(bf16 x, float scale) { return to_bf16(wide(x) * scale); }

template <typename T, typename Scale>
__global__ void drop(Stream stream, uint64_t threshold, Scale scale, const T* x, T* y, size_t n) {
    for (uint64_t b = thread(); 4 * b < n; b += threads()) {
        const Words words = cipher(stream, b);
        for (unsigned w = 0; w < 4; ++w) {
            const uint64_t i = 4 * b + w;
            if (i < n) y[i] = words.of[w] >= threshold ? kept(x[i], scale) : T{};
        }
    }
}

}  // namespace

template <typename T, typename Scale>
void dropout(Stream stream, uint64_t threshold, Scale scale, const T* x, T* y, size_t n, CudaStream queue) {
    launch(drop<T, Scale>, dim3(blocks_of_threads((n + 3) / 4)), queue, stream, threshold, scale, x, y, n);
}

template decltype(dropout<float, float>) dropout<float, float>;
template decltype(dropout<double, double>) dropout<double, double>;
template decltype(dropout<bf16, float>) dropout<bf16, float>;

}  // namespace mpipipe::cuda
