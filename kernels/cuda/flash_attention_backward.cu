// The gradient of queries, a block for 16 of them while the keys pass by; and those of keys and values, a block for
// 16 of them while the queries pass by. The weights are computed in both: sums stay in registers, without atomics.
//
//     p[i, j] = 2^(score[i, j] - lse[i])      delta[i] = o[i] . d_o[i]      ds[i, j] = p (d_o[i] . v[j] - delta[i])
//     dq[i] = scale sum_j ds[i, j] k[j]       dk[j] = scale sum_i ds[i, j] q[i]       dv[j] = sum_i p[i, j] d_o[i]
#include "mpipipe/flash_attention.h"
#include "tiles.cuh"

namespace mpipipe::cuda {
namespace {

// What a query's weights and their gradients are computed from.
struct Query {
    float lse, delta;
};

// A warp for each query, all heads of all samples in a row.
template <typename T>
__global__ void deltas(Problem p, Tokens<const T> o, Tokens<const T> d_o, float* delta) {
    const size_t n = p.batch * p.heads * p.queries;
    for (size_t at = thread() / kWarp; at < n; at += threads() / kWarp) {
        const size_t i = at % p.queries, head = at / p.queries, h = head % p.heads, b = head / p.heads;
        const T *of_o = o.of(b, h).at(i), *of_d_o = d_o.of(b, h).at(i);
        float sum = 0;
        for (size_t e = threadIdx.x % kWarp; e < p.width; e += kWarp) sum += wide(of_o[e]) * wide(of_d_o[e]);
        sum = over_warp<Sum>(sum);
        if (threadIdx.x % kWarp == 0) delta[at] = sum;
    }
}

template <typename Tile, typename T>
__global__ void of_queries(Problem p, Tokens<const T> q, Tokens<const T> k, Tokens<const T> v, Tokens<const T> d_o,
                           const float* lse, const float* delta, Tokens<T> dq) {
    __shared__ typename Tile::Own queries, changes;
    __shared__ typename Tile::Passing passing;
    __shared__ typename Tile::Weights weights;
    const size_t tiles = (p.queries + Tile::kOwn - 1) / Tile::kOwn;
    for (size_t work = blockIdx.x; work < p.batch * p.heads * tiles; work += gridDim.x) {
        const size_t first = work % tiles * Tile::kOwn, head = work / tiles, h = head % p.heads, b = head / p.heads;
        const size_t g = h / p.group(), last = first + Tile::kOwn, keys = p.causal && last < p.keys ? last : p.keys;
        __syncthreads();  // the last work's tiles may still be read
        Tile::load_own(queries, q.of(b, h), first);
        Tile::load_own(changes, d_o.of(b, h), first);
        Query query[Tile::kRows];
        for (int r = 0; r < Tile::kRows; ++r) {
            const size_t i = first + Tile::row(r), at = head * p.queries + i;
            query[r] = i < p.queries ? Query{lse[at], delta[at]} : Query{INFINITY, 0};
        }
        float sum[Tile::kRows][Tile::kColumns] = {};
        for (size_t at = 0; at < keys; at += kWarp) {
            float change[Tile::kRows], score[Tile::kRows];
            Tile::load_passing(passing, v.of(b, g), at);
            Tile::products(changes, passing, change);
            Tile::load_passing(passing, k.of(b, g), at);
            Tile::products(queries, passing, score);
            for (int r = 0; r < Tile::kRows; ++r) {
                const bool seen = p.sees(b, first + Tile::row(r), at + threadIdx.x % kWarp);
                const float weight = exp2f(score[r] * p.log2_scale() - query[r].lse);
                score[r] = seen ? p.scale * weight * (change[r] - query[r].delta) : 0.0f;
            }
            Tile::set(weights, score);
            Tile::add(weights, passing, sum);
        }
        Tile::write(dq.of(b, h), first, sum);
    }
}

template <typename Tile, typename T>
__global__ void of_keys(Problem p, Tokens<const T> q, Tokens<const T> k, Tokens<const T> v, Tokens<const T> d_o,
                        const float* lse, const float* delta, Tokens<T> dk, Tokens<T> dv) {
    __shared__ typename Tile::Own keys, values;
    __shared__ typename Tile::Passing passing;
    __shared__ typename Tile::Weights weights;
    const size_t tiles = (p.keys + Tile::kOwn - 1) / Tile::kOwn;
    for (size_t work = blockIdx.x; work < p.batch * p.key_heads * tiles; work += gridDim.x) {
        const size_t first = work % tiles * Tile::kOwn, g = work / tiles % p.key_heads, b = work / tiles / p.key_heads;
        const size_t earliest = p.causal ? first / kWarp * kWarp : 0;  // query
        __syncthreads();  // the last work's tiles may still be read
        Tile::load_own(keys, k.of(b, g), first);
        Tile::load_own(values, v.of(b, g), first);
        float sum_k[Tile::kRows][Tile::kColumns] = {}, sum_v[Tile::kRows][Tile::kColumns] = {};
        for (size_t h = g * p.group(); h < (g + 1) * p.group(); ++h)
            for (size_t at = earliest; at < p.queries; at += kWarp) {
                const size_t i = at + threadIdx.x % kWarp, row = (b * p.heads + h) * p.queries + i;
                const Query query = i < p.queries ? Query{lse[row], delta[row]} : Query{INFINITY, 0};
                float weight[Tile::kRows], change[Tile::kRows];
                Tile::load_passing(passing, q.of(b, h), at);
                Tile::products(keys, passing, weight);
                Tile::load_passing(passing, d_o.of(b, h), at);
                Tile::products(values, passing, change);
                for (int r = 0; r < Tile::kRows; ++r) {
                    const bool seen = p.sees(b, i, first + Tile::row(r));
                    weight[r] = seen ? exp2f(weight[r] * p.log2_scale() - query.lse) : 0.0f;
                    change[r] = seen ? p.scale * weight[r] * (change[r] - query.delta) : 0.0f;
                }
                Tile::set(weights, weight);
                Tile::add(weights, passing, sum_v);
                Tile::load_passing(passing, q.of(b, h), at);
                Tile::set(weights, change);
                Tile::add(weights, passing, sum_k);
            }
        Tile::write(dk.of(b, g), first, sum_k);
        Tile::write(dv.of(b, g), first, sum_v);
    }
}

}  // namespace

template <typename T>
void flash_attention_backward(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides,
                              Strides v_strides, size_t batch, size_t heads, size_t key_heads, size_t queries,
                              size_t keys, size_t width, bool causal, float scale, const int64_t* key_lengths,
                              const bool* key_mask, const T* o, Strides o_strides, const float* lse, const T* d_o,
                              Strides d_o_strides, T* dq, Strides dq_strides, T* dk, Strides dk_strides, T* dv,
                              Strides dv_strides, CudaStream stream) {
    const Problem p{batch, heads, key_heads, queries, keys, width, causal, scale, key_lengths, key_mask};
    const Tokens<const T> of_q(q, q_strides, queries, width), of_k(k, k_strides, keys, width),
        of_v(v, v_strides, keys, width), of_o(o, o_strides, queries, width), of_d_o(d_o, d_o_strides, queries, width);
    const Workspace<float> delta(batch * heads * queries, stream);
    launch(deltas<T>, dim3(blocks_of_threads(batch * heads * queries * kWarp)), stream, p, of_o, of_d_o, delta.p);
    with_width(width, [&](auto most) {
        using Tile = Tiles<2, most.value>;
        const auto count = [](size_t n) { return dim3(blocks(n)); };
        const auto tiles = [](size_t n) { return (n + Tile::kOwn - 1) / Tile::kOwn; };
        launch(of_queries<Tile, T>, count(batch * heads * tiles(queries)), stream, p, of_q, of_k, of_v, of_d_o, lse,
               delta.p, Tokens<T>(dq, dq_strides, queries, width));
        launch(of_keys<Tile, T>, count(batch * key_heads * tiles(keys)), stream, p, of_q, of_k, of_v, of_d_o, lse,
               delta.p, Tokens<T>(dk, dk_strides, keys, width), Tokens<T>(dv, dv_strides, keys, width));
    });
}

template decltype(flash_attention_backward<float>) flash_attention_backward<float>;
template decltype(flash_attention_backward<bf16>) flash_attention_backward<bf16>;

}  // namespace mpipipe::cuda
