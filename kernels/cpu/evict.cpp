#include "mpipipe/evict.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace mpipipe::cpu {
namespace {

constexpr size_t line = 64;  // bytes; no processor of these has shorter ones, and longer ones are dropped twice

#if defined(__x86_64__)
bool has_clflushopt() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 23 & 1);
}

// Several lines at once: ten times as fast as clflush, which waits for each.
__attribute__((target("clflushopt"))) void drop_together(const char* p, size_t n) {
    for (size_t i = 0; i < n; i += line) _mm_clflushopt(const_cast<char*>(p) + i);
    _mm_sfence();
}

bool drop(const char* p, size_t n) {
    static const bool together = has_clflushopt();
    if (together) {
        drop_together(p, n);
        return true;
    }
    for (size_t i = 0; i < n; i += line) _mm_clflush(p + i);
    _mm_mfence();
    return true;
}
#elif defined(__aarch64__)
bool drop(const char* p, size_t n) {
    for (size_t i = 0; i < n; i += line) asm volatile("dc civac, %0" : : "r"(p + i) : "memory");
    asm volatile("dsb ish" : : : "memory");
    return true;
}
#else
bool drop(const char*, size_t) { return false; }
#endif

}  // namespace

bool evict(const void* p, size_t n) { return drop(static_cast<const char*>(p), n); }

}  // namespace mpipipe::cpu
