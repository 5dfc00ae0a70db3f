// Each kernel against its reference, without Python: under sanitizers, and under qemu for other processors.
//
// A kernel's file defines one CHECK, which runs kernel and reference on drawn inputs and says what must agree:
//
//     CHECK(accumulate) {
//         for (size_t n : sizes) {
//             Buffer<float> x = draw.normal<float>(n), got = x, want = x;
//             cpu::accumulate(got.data(), ...);
//             reference::accumulate(want.data(), ...);
//             run.close("sum, n = " + std::to_string(n), got, want, 1e-6);
//         }
//     }
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>

#include "mpipipe/bf16.h"

namespace mpipipe::check {

// Empty, tiny, around every vector width and tile, and several pieces of the threads.
inline constexpr size_t sizes[] = {0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 255, 257, 1000, 4099, 70001};
inline constexpr int many = 3;  // threads, beside 1

// Whether the kernels for GPUs stand in place of the processor's (check/emulated): nobody waits for what they find.
#ifdef cpu
inline constexpr bool on_gpu = true;
#else
inline constexpr bool on_gpu = false;
#endif

namespace pages {

// `bytes` bytes that end where an inaccessible page begins: to read or write beyond them ends the program.
// Before them are bytes that release() finds written or not.
void* take(size_t bytes);
bool release(void* p, size_t bytes);  // false: somebody wrote before p
[[noreturn]] void written_before();

}  // namespace pages

// n elements, aligned as an element is and no better.
template <typename T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

public:
    explicit Buffer(size_t n = 0) : n_(n), at_(static_cast<T*>(pages::take(n * sizeof(T)))) {}
    Buffer(std::initializer_list<T> values) : Buffer(values.size()) {
        size_t i = 0;
        for (const T& value : values) at_[i++] = value;
    }
    Buffer(const Buffer& other) : Buffer(other.n_) {
        if (n_) std::memcpy(at_, other.at_, n_ * sizeof(T));
    }
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (!pages::release(at_, n_ * sizeof(T))) pages::written_before();
    }

    T* data() { return at_; }
    const T* data() const { return at_; }
    size_t size() const { return n_; }
    T& operator[](size_t i) { return at_[i]; }
    const T& operator[](size_t i) const { return at_[i]; }

private:
    size_t n_;
    T* at_;
};

// Numbers that are the same on every machine (SplitMix64; Steele, Lea, Flood 2014).
class Draw {
public:
    explicit Draw(uint64_t seed) : state_(seed) {}

    uint64_t word();
    double uniform();                                                       // in [0, 1)
    size_t below(size_t n) { return static_cast<size_t>(word() % n); }      // in [0, n), n > 0
    double gaussian();                                                      // of mean 0 and variance 1, about

    template <typename T>
    Buffer<T> normal(size_t n, double scale = 1.0) {
        Buffer<T> out(n);
        for (size_t i = 0; i < n; ++i) out[i] = narrow<T>(static_cast<float>(scale * gaussian()));
        return out;
    }

private:
    uint64_t state_;
};

template <>
inline Buffer<double> Draw::normal<double>(size_t n, double scale) {
    Buffer<double> out(n);
    for (size_t i = 0; i < n; ++i) out[i] = scale * gaussian();
    return out;
}

template <typename T>
double value(T x) {
    if constexpr (std::is_same_v<T, bf16>) return wide(x);
    else return static_cast<double>(x);
}

// Half the distance of two neighbours at 1: what one rounding may cost.
template <typename T>
constexpr double rounding() {
    return std::is_same_v<T, bf16> ? 0x1p-8 : std::is_same_v<T, float> ? 0x1p-24 : 0x1p-53;
}

// What one CHECK found.
class Run {
public:
    explicit Run(const char* kernel) : kernel_(kernel) {}

    // |got - want| <= bound * the largest of `least` and the finite |want|; NaN and infinities at the same places.
    // least: the size of the numbers that the result is a difference of.
    template <typename T, typename U>
    void close(const std::string& what, const Buffer<T>& got, const Buffer<U>& want, double bound,
               double least = 0) {
        double largest = least;
        for (size_t i = 0; i < want.size(); ++i)
            if (std::isfinite(value(want[i]))) largest = std::fmax(largest, std::fabs(value(want[i])));
        ++compared;
        for (size_t i = 0; i < want.size(); ++i) {
            const double a = value(got[i]), b = value(want[i]);
            const bool agree = std::isfinite(b) ? std::fabs(a - b) <= bound * largest : a == b || (a != a && b != b);
            if (!agree) return fail(what, i, want.size(), a, b, bound * largest);
        }
    }

    // The same bits: of another number of threads, or of a kernel that promises its reference's.
    template <typename T>
    void same(const std::string& what, const Buffer<T>& got, const Buffer<T>& want) {
        ++compared;
        for (size_t i = 0; i < want.size(); ++i)
            if (std::memcmp(&got[i], &want[i], sizeof(T)))
                return fail(what, i, want.size(), value(got[i]), value(want[i]), 0);
    }

    size_t compared = 0, failed = 0;

private:
    void fail(const std::string& what, size_t i, size_t n, double got, double want, double allowed);

    const char* kernel_;
};

struct Check {
    using Body = void (*)(Run&, Draw&);
    Check(const char* kernel, Body body);

    const char* kernel;
    Body body;
    const Check* next;
};

}  // namespace mpipipe::check

#define CHECK(kernel)                                                     \
    static void check_##kernel(mpipipe::check::Run&, mpipipe::check::Draw&); \
    static const mpipipe::check::Check kernel##_check(#kernel, check_##kernel); \
    static void check_##kernel([[maybe_unused]] mpipipe::check::Run& run, [[maybe_unused]] mpipipe::check::Draw& draw)
