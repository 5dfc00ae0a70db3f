// The stream against its published words and its reference, dropout against the stream.
#include "mpipipe/philox.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

// Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, result.
CHECK(philox) {
    const uint32_t pi[] = {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0};
    const uint32_t ones[] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u}, zeros[6] = {};
    const struct {
        const uint32_t* in;
        Buffer<uint32_t> out;
    } known[] = {
        {zeros, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
        {ones, {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
        {pi, {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}},
    };
    for (const auto& vector : known) {
        Buffer<uint32_t> got(4);
        reference::philox4x32(vector.in, vector.in + 4, got.data());
        run.same("published vector", got, vector.out);
    }
}

#ifndef cpu  // a GPU has the words inside of dropout alone
CHECK(words) {
    const Stream stream{draw.word(), 7, 5};
    for (uint64_t start : {uint64_t{0}, uint64_t{3}, (uint64_t{1} << 34) - 130, uint64_t{1} << 60})
        for (size_t n : sizes) {
            Buffer<uint32_t> got(n), want(n);
            cpu::words(stream, start, n, got.data(), many);
            reference::words(stream, start, n, want.data(), 1);
            run.same("n = " + std::to_string(n), got, want);
        }
}
#endif

template <typename T, typename Scale>
static void dropout(Run& run, Draw& draw) {
    const Stream stream{draw.word(), 1, 2};
    const Scale scale = static_cast<Scale>(1 / 0.9);
    for (uint64_t threshold : {uint64_t{0}, uint64_t{429496730}, uint64_t{1} << 32})
        for (size_t n : sizes) {
            const Buffer<T> x = draw.normal<T>(n);
            Buffer<T> got(n), want(n), in_place(x);
            Buffer<uint32_t> word(n);
            reference::words(stream, 0, n, word.data(), 1);
            for (size_t i = 0; i < n; ++i) {
                const Scale kept = word[i] >= threshold ? wide(x[i]) * scale : Scale{0};
                if constexpr (std::is_same_v<T, bf16>) want[i] = to_bf16(kept);
                else want[i] = kept;
            }
            cpu::dropout<T, Scale>(stream, threshold, scale, x.data(), got.data(), n, many);
            cpu::dropout<T, Scale>(stream, threshold, scale, in_place.data(), in_place.data(), n, 1);
            run.same("n = " + std::to_string(n), got, want);
            run.same("in place, n = " + std::to_string(n), in_place, want);
        }
}

CHECK(dropout) {
    dropout<float, float>(run, draw);
    dropout<double, double>(run, draw);
    dropout<bf16, float>(run, draw);
}
