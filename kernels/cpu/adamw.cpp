// One pass: 32 bytes of traffic per float32 element, as many for bf16 with its master. The memory is the limit.
//
// Only whole blocks are computed, the last one in padded copies: a compiler may fuse multiply and add in the
// vectorised body of a loop and not in its scalar rest, and bits would tell where an element lies.
#include "mpipipe/adamw.h"

#include <algorithm>
#include <type_traits>

#include "mpipipe/adamw_coefficients.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kBlock = 64;           // elements; a multiple of every vector width
constexpr size_t kPiece = kBlock << 8;  // per turn of a thread

template <typename T>
struct Buffers {
    T *param, *grad;
    float *m, *v, *master;
    Buffers from(size_t i) const { return {param + i, grad + i, m + i, v + i, master ? master + i : nullptr}; }
};

// Memory works at the next block while roots and quotients of this one are computed.
template <typename T>
void fetch(const T* block) {
    for (size_t i = 0; i < kBlock; i += 64 / sizeof(T)) __builtin_prefetch(block + i, 1);
}

// n: a multiple of kBlock
template <typename T>
void update(Coefficients c, Buffers<T> at, size_t n) {
    T* __restrict param = at.param;
    T* __restrict grad = at.grad;
    float *__restrict m = at.m, *__restrict v = at.v, *__restrict master = at.master;
    for (size_t block = 0; block < n; block += kBlock) {
        const size_t next = block + kBlock;
        if (next < n) {
            fetch(param + next), fetch(grad + next), fetch(m + next), fetch(v + next);
            if constexpr (!std::is_same_v<T, float>) fetch(master + next);
        }
#pragma omp simd
        for (size_t i = block; i < next; ++i) {
            const float g = wide(grad[i]) * c.factor;
            const float mean = m[i] + c.first * (g - m[i]);
            const float square = c.keep * v[i] + c.second * (g * g);
            float w;
            if constexpr (std::is_same_v<T, float>)
                w = param[i];
            else
                w = master[i];
            w = w * c.decay - c.rate * mean / (__builtin_sqrtf(square) + c.eps);
            m[i] = mean;
            v[i] = square;
            param[i] = narrow<T>(w);
            if constexpr (!std::is_same_v<T, float>) master[i] = w;
        }
        std::fill_n(grad + block, kBlock, T{});  // apart: in the loop it would keep bf16 from being vectorised
    }
}

// n: below kBlock
template <typename T>
void update_rest(Coefficients c, Buffers<T> at, size_t n) {
    T param[kBlock] = {}, grad[kBlock] = {};
    float m[kBlock] = {}, v[kBlock] = {}, master[kBlock] = {};
    std::copy_n(at.param, n, param), std::copy_n(at.grad, n, grad);
    std::copy_n(at.m, n, m), std::copy_n(at.v, n, v);
    if (at.master) std::copy_n(at.master, n, master);
    update<T>(c, {param, grad, m, v, master}, kBlock);
    std::copy_n(param, n, at.param), std::copy_n(grad, n, at.grad);
    std::copy_n(m, n, at.m), std::copy_n(v, n, at.v);
    if (at.master) std::copy_n(master, n, at.master);
}

}  // namespace

template <typename T>
void adamw(T* param, T* grad, float* m, float* v, float* master, size_t n, double factor, double lr, double beta1,
           double beta2, double eps, double weight_decay, int64_t step, int threads) {
    const Coefficients c = coefficients(factor, lr, beta1, beta2, eps, weight_decay, step);

    const Buffers<T> all{param, grad, m, v, master};
    const size_t whole = n / kBlock * kBlock;
    parallel_pieces(whole, kPiece, threads,
                    [=](size_t first, size_t last) { update<T>(c, all.from(first), last - first); });
    if (whole < n) update_rest<T>(c, all.from(whole), n - whole);
}

template decltype(adamw<float>) adamw<float>;
template decltype(adamw<bf16>) adamw<bf16>;

}  // namespace mpipipe::cpu
