// The stream in vectors, and dropout in one pass over it.
//
// A tile of blocks is ciphered lane by lane (one lane = one block), then read in element order. The tile
// stays in the first-level cache: 1 KiB of words for each 1 KiB of float32 that dropout reads.
#include "mpipipe/philox.h"

#include <algorithm>
#include <cstring>

#include "mpipipe/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "mpipipe/vectors.h"
#endif

namespace mpipipe::cpu {
namespace {

constexpr size_t kBlocks = 64;  // per tile; a multiple of every vector width
constexpr size_t kTile = 4 * kBlocks;
constexpr size_t kAhead = 2 * kTile;   // elements
constexpr size_t kPiece = kTile << 6;  // elements per turn of a thread

// The cipher: constants of a round, and what is added to the key after it.
constexpr uint32_t kFactor0 = 0xD2511F53, kFactor2 = 0xCD9E8D57, kStep0 = 0x9E3779B9, kStep1 = 0xBB67AE85;

// tile: out[4 j + w] = word w of block first + j. The high half of the counter is per lane: the carry is exact.
#if defined(__x86_64__)

// A lane is 64 bits with a word in its low half. What is above is left over from earlier rounds: the multiplication
// does not read it, so nothing is masked before the end. A compiler makes twice as many instructions of a plain loop.
typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));
constexpr size_t kWide = kVectorBytes / sizeof(uint64_t);
constexpr size_t kTogether = kWide == 8 ? 4 : 2;  // vectors of each word: all stay in the 32 registers, or 16
static_assert(kBlocks % (kTogether * kWide) == 0);

inline Words product(Words x, uint32_t factor) {
#if defined(__AVX512F__)
    return (Words)_mm512_maskz_mul_epu32(0xFF, (__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    return (Words)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#else
    return (Words)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(factor));
#endif
}

void tile(Stream stream, uint64_t first, uint32_t* out) {
    Words lane;
    for (size_t i = 0; i < kWide; ++i) lane[i] = i;
    for (size_t done = 0; done < kBlocks; done += kTogether * kWide) {
        Words c0[kTogether], c1[kTogether], c2[kTogether], c3[kTogether];
        for (size_t v = 0; v < kTogether; ++v) {
            c0[v] = lane + (first + done + v * kWide);
            c1[v] = c0[v] >> 32;
            c2[v] = Words{} + stream.step;
            c3[v] = Words{} + stream.micro;
        }
        uint32_t k0 = static_cast<uint32_t>(stream.key), k1 = static_cast<uint32_t>(stream.key >> 32);
#pragma GCC unroll 10  // nothing is copied from register to register
        for (int round = 0; round < 10; ++round, k0 += kStep0, k1 += kStep1) {
#pragma GCC unroll 4
            for (size_t v = 0; v < kTogether; ++v) {
                const Words a = product(c0[v], kFactor0), b = product(c2[v], kFactor2);
                c0[v] = (b >> 32) ^ c1[v] ^ uint64_t{k0};
                c1[v] = b;
                c2[v] = (a >> 32) ^ c3[v] ^ uint64_t{k1};
                c3[v] = a;
            }
        }
        for (size_t v = 0; v < kTogether; ++v) {
            const Words low = (c0[v] & 0xFFFFFFFF) | c1[v] << 32, high = (c2[v] & 0xFFFFFFFF) | c3[v] << 32;
            Words blocks[2];
            interleave(low, high, blocks[0], blocks[1], std::make_index_sequence<kWide>());
            std::memcpy(out + 4 * (done + v * kWide), blocks, sizeof blocks);
        }
    }
}

#else

void tile(Stream stream, uint64_t first, uint32_t* out) {
    uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
    for (size_t j = 0; j < kBlocks; ++j) {
        c0[j] = static_cast<uint32_t>(first + j);
        c1[j] = static_cast<uint32_t>((first + j) >> 32);
        c2[j] = stream.step;
        c3[j] = stream.micro;
    }
    uint32_t k0 = static_cast<uint32_t>(stream.key), k1 = static_cast<uint32_t>(stream.key >> 32);
    for (int round = 0; round < 10; ++round, k0 += kStep0, k1 += kStep1) {
        for (size_t j = 0; j < kBlocks; ++j) {
            const uint64_t a = uint64_t{kFactor0} * c0[j];
            const uint64_t b = uint64_t{kFactor2} * c2[j];
            c0[j] = static_cast<uint32_t>(b >> 32) ^ c1[j] ^ k0;
            c1[j] = static_cast<uint32_t>(b);
            c2[j] = static_cast<uint32_t>(a >> 32) ^ c3[j] ^ k1;
            c3[j] = static_cast<uint32_t>(a);
        }
    }
    for (size_t j = 0; j < kBlocks; ++j) {
        out[4 * j + 0] = c0[j], out[4 * j + 1] = c1[j], out[4 * j + 2] = c2[j], out[4 * j + 3] = c3[j];
    }
}

#endif

// Calls body(words, offset, count) for consecutive pieces of [start, start + n).
template <typename Body>
void for_tiles(Stream stream, uint64_t start, size_t n, Body body) {
    alignas(64) uint32_t w[kTile];  // no vector across two lines of the cache
    size_t skip = start % 4;  // only the first piece can begin inside a block
    uint64_t block = start / 4;
    for (size_t done = 0; done < n; block += kBlocks, skip = 0) {
        tile(stream, block, w);
        const size_t count = std::min(n - done, kTile - skip);
        body(w + skip, done, count);
        done += count;
    }
}

// Memory works while the next tiles are ciphered. Half-size elements come soon enough without being asked for.
template <typename T>
void fetch(const T* from, T* to) {
    if (sizeof(T) < 4) return;
    for (size_t i = 0; i < kTile; i += 64 / sizeof(T)) {
        __builtin_prefetch(from + i);
        __builtin_prefetch(to + i, 1);
    }
}

// The select is between numbers that were computed for all elements: it needs no branch.
inline float kept(float x, float scale, bool keep) { return keep ? x * scale : 0.0f; }
inline double kept(double x, double scale, bool keep) { return keep ? x * scale : 0.0; }
inline bf16 kept(bf16 x, float scale, bool keep) { return to_bf16(keep ? wide(x) * scale : 0.0f); }

}  // namespace

void words(Stream stream, uint64_t start, size_t n, uint32_t* out, int threads) {
    parallel_pieces(n, kPiece, threads, [=](size_t first, size_t last) {
        for_tiles(stream, start + first, last - first, [=](const uint32_t* w, size_t offset, size_t count) {
            std::memcpy(out + first + offset, w, count * sizeof *w);
        });
    });
}

template <typename T, typename Scale>
void dropout(Stream stream, uint64_t threshold, Scale scale, const T* x, T* y, size_t n, int threads) {
    if (threshold > UINT32_MAX) {  // p = 1: no 32-bit word reaches it
        std::fill_n(y, n, T{});
        return;
    }
    const uint32_t least = static_cast<uint32_t>(threshold);
    parallel_pieces(n, kPiece, threads, [=](size_t first, size_t last) {
        for_tiles(stream, first, last - first, [=](const uint32_t* w, size_t offset, size_t count) {
            const T* from = x + first + offset;
            T* to = y + first + offset;
            fetch(from + kAhead, to + kAhead);
#pragma omp simd
            for (size_t i = 0; i < count; ++i) to[i] = kept(from[i], scale, w[i] >= least);
        });
    });
}

template decltype(dropout<float, float>) dropout<float, float>;
template decltype(dropout<double, double>) dropout<double, double>;
template decltype(dropout<bf16, float>) dropout<bf16, float>;

}  // namespace mpipipe::cpu
