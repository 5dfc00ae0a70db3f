// The meaning of attention: the rows of weights one at a time, in double. Slow on purpose.
#include "mpipipe/flash_attention.h"

#include <cmath>
#include <limits>
#include <vector>

namespace mpipipe::reference {
namespace {

template <typename T>
T* token(T* x, const Strides& s, size_t b, size_t h, size_t i) {
    return x + static_cast<ptrdiff_t>(b) * s[0] + static_cast<ptrdiff_t>(h) * s[1] + static_cast<ptrdiff_t>(i) * s[2];
}

template <typename T>
double dot(const T* x, const T* y, size_t n) {
    double sum = 0;
    for (size_t e = 0; e < n; ++e) sum += double{wide(x[e])} * double{wide(y[e])};
    return sum;
}

bool sees(size_t b, size_t i, size_t j, size_t keys, bool causal, const int64_t* key_lengths, const bool* key_mask) {
    return !(causal && j > i) && !(key_lengths && static_cast<int64_t>(j) >= key_lengths[b]) &&
           !(key_mask && !key_mask[b * keys + j]);
}

}  // namespace

template <typename T>
void flash_attention(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides, Strides v_strides,
                     size_t batch, size_t heads, size_t key_heads, size_t queries, size_t keys, size_t width,
                     bool causal, float scale, const int64_t* key_lengths, const bool* key_mask, T* o,
                     Strides o_strides, float* lse, int) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    for (size_t b = 0; b < batch; ++b)
        for (size_t h = 0; h < heads; ++h)
            for (size_t i = 0; i < queries; ++i) {
                const size_t g = h / (heads / key_heads);
                std::vector<double> score(keys), sum(width);
                double greatest = -infinity, total = 0;
                bool nothing = true;
                for (size_t j = 0; j < keys; ++j) {
                    if (!sees(b, i, j, keys, causal, key_lengths, key_mask)) continue;
                    const T *query = token(q, q_strides, b, h, i), *key = token(k, k_strides, b, g, j);
                    score[j] = scale * dot(query, key, width);
                    greatest = score[j] > greatest ? score[j] : greatest;
                    nothing = false;
                }
                for (size_t j = 0; j < keys; ++j) {
                    if (!sees(b, i, j, keys, causal, key_lengths, key_mask)) continue;
                    const double weight = std::exp(score[j] - greatest);
                    total += weight;
                    for (size_t e = 0; e < width; ++e) sum[e] += weight * wide(token(v, v_strides, b, g, j)[e]);
                }
                T* to = token(o, o_strides, b, h, i);
                for (size_t e = 0; e < width; ++e)
                    to[e] = narrow<T>(nothing ? 0.0f : static_cast<float>(sum[e] / total));
                const double log_sum = (greatest + std::log(total)) / std::log(2.0);
                lse[(b * heads + h) * queries + i] = static_cast<float>(nothing ? infinity : log_sum);
            }
}

template <typename T>
void flash_attention_backward(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides,
                              Strides v_strides, size_t batch, size_t heads, size_t key_heads, size_t queries,
                              size_t keys, size_t width, bool causal, float scale, const int64_t* key_lengths,
                              const bool* key_mask, const T* o, Strides o_strides, const float* lse, const T* d_o,
                              Strides d_o_strides, T* dq, Strides dq_strides, T* dk, Strides dk_strides, T* dv,
                              Strides dv_strides, int) {
    for (size_t b = 0; b < batch; ++b)
        for (size_t g = 0; g < key_heads; ++g) {
            std::vector<double> dk_sum(keys * width), dv_sum(keys * width);
            for (size_t h = g * (heads / key_heads); h < (g + 1) * (heads / key_heads); ++h)
                for (size_t i = 0; i < queries; ++i) {
                    const T *query = token(q, q_strides, b, h, i), *change = token(d_o, d_o_strides, b, h, i);
                    const double delta = dot(token(o, o_strides, b, h, i), change, width);
                    std::vector<double> dq_sum(width);
                    for (size_t j = 0; j < keys; ++j) {
                        if (!sees(b, i, j, keys, causal, key_lengths, key_mask)) continue;
                        const T *key = token(k, k_strides, b, g, j), *value = token(v, v_strides, b, g, j);
                        const double score = scale * dot(query, key, width) / std::log(2.0);
                        const double weight = std::exp2(score - lse[(b * heads + h) * queries + i]);
                        const double ds = scale * weight * (dot(change, value, width) - delta);
                        for (size_t e = 0; e < width; ++e) {
                            dq_sum[e] += ds * wide(key[e]);
                            dk_sum[j * width + e] += ds * wide(query[e]);
                            dv_sum[j * width + e] += weight * wide(change[e]);
                        }
                    }
                    for (size_t e = 0; e < width; ++e)
                        token(dq, dq_strides, b, h, i)[e] = narrow<T>(static_cast<float>(dq_sum[e]));
                }
            for (size_t j = 0; j < keys; ++j)
                for (size_t e = 0; e < width; ++e) {
                    token(dk, dk_strides, b, g, j)[e] = narrow<T>(static_cast<float>(dk_sum[j * width + e]));
                    token(dv, dv_strides, b, g, j)[e] = narrow<T>(static_cast<float>(dv_sum[j * width + e]));
                }
        }
}

template decltype(flash_attention<float>) flash_attention<float>;
template decltype(flash_attention<bf16>) flash_attention<bf16>;
template decltype(flash_attention_backward<float>) flash_attention_backward<float>;
template decltype(flash_attention_backward<bf16>) flash_attention_backward<bf16>;

}  // namespace mpipipe::reference
