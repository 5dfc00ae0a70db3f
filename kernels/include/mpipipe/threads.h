// Work on several threads, with results that do not depend on how many.
//
// Work is split into pieces by its own size alone, never by the number of threads (but that of gemm, where no sum is
// parted); a piece writes only what is its own. Sums over pieces go through a buffer of one partial per piece, added
// in the order of the pieces.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <type_traits>

namespace mpipipe {

// What a piece of work throws, such as where there is no memory: none may leave a parallel region, so the first one is
// thrown again behind it. What comes after it is left out, as what a thread holds may be half made.
class Caught {
  public:
    template <typename Body>
    void in(Body body) {
        if (any_.load(std::memory_order_relaxed)) return;
        try {
            body();
        } catch (...) {
            if (!any_.exchange(true)) first_ = std::current_exception();
        }
    }
    void again() const {
        if (first_) std::rethrow_exception(first_);
    }

  private:
    std::atomic<bool> any_ = false;
    std::exception_ptr first_;
};

// body(i) for i in [0, n), each once, in any order and on up to `threads` threads (1: on the caller's own).
template <typename Body>
void parallel_for(size_t n, int threads, Body body) {
    Caught caught;
    // not inlined: compiled once, the bits are the same on the caller's thread
    const auto one = [&](size_t i) __attribute__((noinline, noclone)) { caught.in([&] { body(i); }); };
    if (threads > 1 && n > 1) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (size_t i = 0; i < n; ++i) one(i);
    } else {  // a region of one thread costs some hundred nanoseconds all the same
        for (size_t i = 0; i < n; ++i) one(i);
    }
    caught.again();
}

// body(i, held) likewise, with a `Held` for each thread: it may keep from one i to the next what changes no result.
template <typename Held, typename Body>
void parallel_for_holding(size_t n, int threads, Body body) {
    static_assert(std::is_nothrow_default_constructible_v<Held>);
    Caught caught;
    const auto one = [&](size_t i, Held& held) __attribute__((noinline, noclone)) { caught.in([&] { body(i, held); }); };
    if (threads > 1 && n > 1) {
#pragma omp parallel num_threads(threads)
        {
            Held held;
#pragma omp for schedule(static)
            for (size_t i = 0; i < n; ++i) one(i, held);
        }
    } else {
        Held held;
        for (size_t i = 0; i < n; ++i) one(i, held);
    }
    caught.again();
}

// body(first, last) for the pieces of `piece` items, the last one shorter, that [0, n) falls into.
template <typename Body>
void parallel_pieces(size_t n, size_t piece, int threads, Body body) {
    parallel_for((n + piece - 1) / piece, threads, [&](size_t i) {
        const size_t first = i * piece;
        body(first, first + piece < n ? first + piece : n);
    });
}

}  // namespace mpipipe
