// Threads of a block as fibers: contexts start them (makecontext), jumps go from one to the next.
#include <ucontext.h>

#include <csetjmp>
#include <cstdio>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, gridDim;

namespace emulated {
namespace {

constexpr size_t kStack = 1 << 16;  // bytes
constexpr unsigned kWarp = 32;

struct Barrier {
    unsigned members = 0, arrived = 0, passed = 0;
};

struct Fiber {
    ucontext_t start;
    std::jmp_buf at;
    std::unique_ptr<char[]> stack{new char[kStack]};
    bool started = false, done = true;
    const Barrier* waits_at = nullptr;
    unsigned passed = 0;  // of that barrier when it came there
    bool turn = false;

    bool ready() const { return !done && !(waits_at && waits_at->passed == passed); }
};

std::vector<Fiber> fibers;
std::vector<Barrier> warps;
Barrier block;
std::vector<uint64_t> given[2];  // by each thread to its warp, in turn: nobody is two exchanges ahead
const std::function<void()>* kernel;
std::jmp_buf scheduler;
uint64_t state = 1;

void give_way() {
    if (!_setjmp(fibers[threadIdx.x].at)) std::longjmp(scheduler, 1);
}

void body() {
    for (;;) {
        (*kernel)();
        fibers[threadIdx.x].done = true;
        give_way();
    }
}

void go_on(unsigned thread) {
    threadIdx.x = thread;
    Fiber& fiber = fibers[thread];
    if (_setjmp(scheduler)) return;
    if (fiber.started) std::longjmp(fiber.at, 1);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    makecontext(&fiber.start, body, 0);
    setcontext(&fiber.start);
}

void wait(Barrier& barrier) {
    Fiber& me = fibers[threadIdx.x];
    if (++barrier.arrived == barrier.members) {
        barrier.arrived = 0;
        ++barrier.passed;
        return;
    }
    me.waits_at = &barrier;
    me.passed = barrier.passed;
    give_way();
    me.waits_at = nullptr;
}

// Runs those of the threads that can, once, in an order of its own, but none of the `slow` warps (a bit for each).
bool some_ran(unsigned threads, uint64_t slow) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const unsigned first = static_cast<unsigned>(state >> 33), step = static_cast<unsigned>(state >> 40) | 1;
    bool any = false;
    for (unsigned i = 0; i < threads; ++i) {
        const unsigned thread = (first + i * step) % threads;
        if (slow >> (thread / kWarp) & 1 || !fibers[thread].ready()) continue;
        any = true;
        go_on(thread);
    }
    return any;
}

// Some warps go ahead of the others as far as barriers let them.
void run_block(unsigned threads) {
    for (unsigned i = 0; i < threads; ++i) fibers[i].done = false;
    do {
        const uint64_t slow = state >> 50;
        while (some_ran(threads, slow)) continue;
    } while (some_ran(threads, 0));
    for (unsigned i = 0; i < threads; ++i)
        if (!fibers[i].done) std::printf("a barrier is not reached by all threads of a block\n"), std::exit(1);
}

}  // namespace

void wait_for_block() { wait(block); }
void wait_for_warp() { wait(warps[threadIdx.x / kWarp]); }
unsigned lane() { return threadIdx.x % kWarp; }

uint64_t exchange(uint64_t mine, unsigned other) {
    auto& now = given[fibers[threadIdx.x].turn = !fibers[threadIdx.x].turn];
    now[threadIdx.x] = mine;
    wait_for_warp();
    return now[threadIdx.x / kWarp * kWarp + other];
}

// threads.x is a power of 2, so that every odd step comes to all of them.
void run(dim3 blocks, dim3 threads, const std::function<void()>& body_of_thread) {
    if (fibers.size() != threads.x) {
        fibers = std::vector<Fiber>(threads.x);
        warps = std::vector<Barrier>(threads.x / kWarp);
        for (auto& turn : given) turn.resize(threads.x);
        block.members = threads.x;
        for (Barrier& warp : warps) warp.members = kWarp;
    }
    kernel = &body_of_thread;
    gridDim = blocks;
    for (blockIdx.y = 0; blockIdx.y < blocks.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < blocks.x; ++blockIdx.x) run_block(threads.x);
}

}  // namespace emulated
