// Runs every CHECK, or those that are named: `check [kernel ...]`. Exit code 1 where something disagrees.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "check.h"

namespace mpipipe::check {
namespace {

const Check* first = nullptr;
constexpr unsigned char untouched = 0xA5;

size_t rounded_up(size_t bytes, size_t page) { return (bytes + page - 1) / page * page; }

int vector_bytes() {
#if defined(__ARM_FEATURE_SVE)
    int64_t bytes;
    asm("cntb %0" : "=r"(bytes));
    return static_cast<int>(bytes);
#elif defined(__AVX512F__)
    return 64;
#elif defined(__AVX__)
    return 32;
#else
    return 16;
#endif
}

bool chosen(const char* kernel, int n, char** names) {
    for (int i = 1; i < n; ++i)
        if (!std::strcmp(kernel, names[i])) return true;
    return n < 2;
}

}  // namespace

void* pages::take(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), room = rounded_up(bytes, page) + page;
    void* start = mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) std::perror("mmap"), std::abort();
    auto* end = static_cast<unsigned char*>(start) + room;
    if (mprotect(end, page, PROT_NONE)) std::perror("mprotect"), std::abort();
    std::memset(start, untouched, room - bytes);
    return end - bytes;
}

bool pages::release(void* p, size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), room = rounded_up(bytes, page) + page;
    auto* start = static_cast<unsigned char*>(p) + bytes - room;
    bool clean = true;
    for (size_t i = 0; i < room - bytes; ++i) clean = clean && start[i] == untouched;
    munmap(start, room + page);
    return clean;
}

void pages::written_before() {
    std::printf("a kernel wrote before the first element of a buffer\n");
    std::exit(1);
}

uint64_t Draw::word() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

double Draw::uniform() { return static_cast<double>(word() >> 11) * 0x1p-53; }

double Draw::gaussian() {
    double sum = 0;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum - 6;
}

void Run::fail(const std::string& what, size_t i, size_t n, double got, double want, double allowed) {
    ++failed;
    std::printf("%s, %s: element %zu of %zu is %.9g, the reference has %.9g; allowed is a difference of %.3g\n",
                kernel_, what.c_str(), i, n, got, want, allowed);
}

Check::Check(const char* name, Body f) : kernel(name), body(f), next(first) { first = this; }

}  // namespace mpipipe::check

int main(int n, char** names) {
    using namespace mpipipe::check;
    size_t failed = 0;
    std::printf("instruction set %s, vectors of %d bytes\n", MPIPIPE_SET, vector_bytes());
    for (const Check* check = first; check; check = check->next) {
        if (!chosen(check->kernel, n, names)) continue;
        Run run(check->kernel);
        Draw draw(1);
        check->body(run, draw);
        std::printf("%-22s %5zu comparisons, %zu failed\n", check->kernel, run.compared, run.failed);
        failed += run.failed;
    }
    return failed ? 1 : 0;
}
