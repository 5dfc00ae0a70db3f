// A block for 32 queries of a head; the keys pass by in tiles of 32, the softmax is kept online.
#include "mpipipe/flash_attention.h"

#include "tiles.cuh"

namespace mpipipe::cuda {
namespace {

// What is kept of a query's weights: the largest score, and the sum of 2^(score - largest).
struct Softmax {
    float most = -INFINITY, total = 0;
    bool any = false;  // key was seen

    // The weight of the lane's score beside those of the warp; what was summed before is to be multiplied by `factor`.
    __device__ float add(float score, bool seen, float* factor) {
        const float largest = fmaxf(most, over_warp<Largest>(seen ? score : -INFINITY));
        const float shift = largest == -INFINITY ? 0.0f : largest;  // else their difference would be NaN
        const float weight = seen ? exp2f(score - shift) : 0.0f;
        *factor = exp2f(most - shift);
        total = total * *factor + over_warp<Sum>(weight);
        most = largest;
        any = any || __any_sync(~0u, seen);
        return weight;
    }
};

template <typename Tile, typename T>
__global__ void forward(Problem p, Tokens<const T> q, Tokens<const T> k, Tokens<const T> v, Tokens<T> o, float* lse) {
    __shared__ typename Tile::Own queries;
    __shared__ typename Tile::Passing passing;
    __shared__ typename Tile::Weights weights;
    const size_t tiles = (p.queries + Tile::kOwn - 1) / Tile::kOwn;
    for (size_t work = blockIdx.x; work < p.batch * p.heads * tiles; work += gridDim.x) {
        const size_t first = work % tiles * Tile::kOwn, head = work / tiles, h = head % p.heads, b = head / p.heads;
        const size_t g = h / p.group(), last = first + Tile::kOwn, keys = p.causal && last < p.keys ? last : p.keys;
        __syncthreads();  // the last work's tile may still be read
        Tile::load_own(queries, q.of(b, h), first);
        Softmax softmax[Tile::kRows];
        float sum[Tile::kRows][Tile::kColumns] = {};
        for (size_t at = 0; at < keys; at += kWarp) {
            float weight[Tile::kRows];
            Tile::load_passing(passing, k.of(b, g), at);
            Tile::products(queries, passing, weight);
            Tile::load_passing(passing, v.of(b, g), at);
            for (int r = 0; r < Tile::kRows; ++r) {
                const bool seen = p.sees(b, first + Tile::row(r), at + threadIdx.x % kWarp);
                float factor;
                weight[r] = softmax[r].add(weight[r] * p.log2_scale(), seen, &factor);
                for (float& x : sum[r]) x *= factor;
            }
            Tile::set(weights, weight);
            Tile::add(weights, passing, sum);
        }
        for (int r = 0; r < Tile::kRows; ++r) {
            const size_t i = first + Tile::row(r);
            const Softmax of = softmax[r];
            for (float& x : sum[r]) x = of.any ? x / of.total : 0.0f;
            if (i < p.queries && threadIdx.x % kWarp == 0)
                lse[head * p.queries + i] = of.any ? of.most + log2f(of.total) : INFINITY;
        }
        Tile::write(o.of(b, h), first, sum);
    }
}

}  // namespace

template <typename T>
void flash_attention(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides, Strides v_strides,
                     size_t batch, size_t heads, size_t key_heads, size_t queries, size_t keys, size_t width,
                     bool causal, float scale, const int64_t* key_lengths, const bool* key_mask, T* o,
                     Strides o_strides, float* lse, CudaStream stream) {
    const Problem p{batch, heads, key_heads, queries, keys, width, causal, scale, key_lengths, key_mask};
    with_width(width, [&](auto most) {
        using Tile = Tiles<4, most.value>;
        launch(forward<Tile, T>, dim3(blocks(batch * heads * ((queries + Tile::kOwn - 1) / Tile::kOwn))), stream, p,
               Tokens<const T>(q, q_strides, queries, width), Tokens<const T>(k, k_strides, keys, width),
               Tokens<const T>(v, v_strides, keys, width), Tokens<T>(o, o_strides, queries, width), lse);
    });
}

template decltype(flash_attention<float>) flash_attention<float>;
template decltype(flash_attention<bf16>) flash_attention<bf16>;

}  // namespace mpipipe::cuda
