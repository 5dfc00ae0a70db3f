// The stream in plain loops that a compiler vectorises, and dropout in one pass over it.
//
// A tile of blocks is ciphered lane by lane (one lane = one block), then read in element order. The tile
// stays in the first-level cache: 1 KiB of words for each 1 KiB of float32 that dropout reads.
#include "mpipipe/philox.h"

#include <algorithm>
#include <cstring>

#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kBlocks = 64;  // per tile; a multiple of every vector width
constexpr size_t kTile = 4 * kBlocks;
constexpr size_t kAhead = 2 * kTile;   // elements
constexpr size_t kPiece = kTile << 6;  // elements per turn of a thread

// out[4 j + w] = word w of block first + j. The high half of the counter is per lane: the carry is exact.
void tile(Stream stream, uint64_t first, uint32_t* out) {
    uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
    for (size_t j = 0; j < kBlocks; ++j) {
        c0[j] = static_cast<uint32_t>(first + j);
        c1[j] = static_cast<uint32_t>((first + j) >> 32);
        c2[j] = stream.step;
        c3[j] = stream.micro;
    }
    uint32_t k0 = static_cast<uint32_t>(stream.key), k1 = static_cast<uint32_t>(stream.key >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
        for (size_t j = 0; j < kBlocks; ++j) {
            const uint64_t a = uint64_t{0xD2511F53} * c0[j];
            const uint64_t b = uint64_t{0xCD9E8D57} * c2[j];
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

// Calls body(words, offset, count) for consecutive pieces of [start, start + n).
template <typename Body>
void for_tiles(Stream stream, uint64_t start, size_t n, Body body) {
    uint32_t w[kTile];
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

template void dropout<float, float>(Stream, uint64_t, float, const float*, float*, size_t, int);
template void dropout<double, double>(Stream, uint64_t, double, const double*, double*, size_t, int);
template void dropout<bf16, float>(Stream, uint64_t, float, const bf16*, bf16*, size_t, int);

}  // namespace mpipipe::cpu
