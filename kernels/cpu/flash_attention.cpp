// Attention forward, a tile of queries at a time over the keys that it sees (Dao et al. 2022, Algorithm 1 with the
// loops exchanged, as in FlashAttention-2, Dao 2023): the running maximum and sum of each query stay with the tile.
#include "mpipipe/flash_attention.h"

#include <cmath>

#include "flash_attention_tiles.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

// Of each query: greatest score so far, sum of 2^(score - greatest), and what that sum was multiplied by last.
struct Running {
    alignas(64) float greatest[kQueries], sum[kQueries], factor[kQueries];
};

// s = 2^(s - greatest), column by column; of Pairs as words of two keys, in the rows above.
template <typename Word>
[[gnu::noinline]] void weigh(const Tile& t, float* s, Running& r) {
    for (size_t i = 0; i < kQueries; i += kLanes) {
        const size_t keys = t.last_key(i / kStrip * kStrip);
        const Vector before = load(r.greatest + i);
        Vector greatest = before, other = before;  // of even and odd keys: two maxima need not wait for each other
        for (size_t k = 0; k < keys; k += 2) {
            const Vector x = load(s + k * kQueries + i), y = load(s + std::min(k + 1, keys - 1) * kQueries + i);
            greatest = x > greatest ? x : greatest;
            other = y > other ? y : other;
        }
        greatest = other > greatest ? other : greatest;
        const Vector base = greatest == -kInfinity ? Vector{} : greatest;  // nothing seen yet: 2^-inf = 0
        Vector sum = {};
        const auto weight = [&](size_t k) {
            const Vector w = exp2_(load(s + k * kQueries + i) - base);
            sum += w;
            return w;
        };
        if constexpr (Word::kDepth == 1) {
            for (size_t k = 0; k < keys; ++k) store(s + k * kQueries + i, weight(k));
        } else {
            for (size_t k = 0; k < keys; k += 2) {
                const Vector first = weight(k), second = k + 1 < keys ? weight(k + 1) : Vector{};
                store(s + k / 2 * kQueries + i, Word::zip(Word::round(first, second)));
            }
        }
        const Vector factor = exp2_(before - base);
        store(r.greatest + i, greatest);
        store(r.factor + i, factor);
        store(r.sum + i, load(r.sum + i) * factor + sum);
    }
}

// What a thread keeps: consecutive pieces of work are most often of one head.
template <typename Word>
struct Held {
    size_t head = SIZE_MAX;
    Tokens<Word> keys, values, queries;
    Floats scratch;
};

template <typename T>
struct Forward {
    using Word = Words<T>;

    Problem p;
    const T *q, *k, *v;
    Strides q_strides, k_strides, v_strides;
    T* o;
    Strides o_strides;
    float* lse;

    // All query tiles of `group` of the heads that share a key head.
    void operator()(size_t b, size_t key_head, size_t group, size_t groups, Held<Word>& held) const {
        const size_t seen = p.seen(b), padded = p.padded(), tiles = p.query_tiles();
        if (held.head != b * p.key_heads + key_head) {
            held.head = b * p.key_heads + key_head;
            held.keys.take(at(k, k_strides, b, key_head), k_strides[2], seen, p.width, padded, Tokens<Word>::rows);
            held.values.take(at(v, v_strides, b, key_head), v_strides[2], seen, p.width, padded, Tokens<Word>::down);
        }
        if (!held.scratch) held.scratch = floats(kQueries * (p.width + kKeys + padded));
        for (size_t h = key_head * p.heads_per_key(); h < (key_head + 1) * p.heads_per_key(); ++h) {
            for (size_t t = 0; t < tiles; ++t) {
                if (belongs(t, tiles, groups, group)) tile(b, h, t * kQueries, seen, held);
            }
        }
    }

    void tile(size_t b, size_t h, size_t i0, size_t seen, Held<Word>& held) const {
        const size_t rows = std::min(kQueries, p.queries - i0), padded = p.padded();
        const T* from = at(q, q_strides, b, h) + static_cast<ptrdiff_t>(i0) * q_strides[2];
        float *turned = held.scratch.get(), *s = turned + p.width * kQueries, *sum = s + kKeys * kQueries;
        const float factor = p.scale * kLog2e;
        foresee<Level::second>(at(o, o_strides, b, h) + static_cast<ptrdiff_t>(i0) * o_strides[2], o_strides[2], rows,
                               p.width);
        held.queries.take(from, q_strides[2], rows, p.width, padded, Tokens<Word>::rows);
        turn(held.queries, 0, rows, p.width, factor, turned);
        Running r;
        std::fill_n(r.greatest, kQueries, -kInfinity);
        std::fill_n(r.sum, kQueries, 0.0f);
        std::fill_n(sum, kQueries * padded, 0.0f);
        const size_t end = p.causal ? std::min(seen, i0 + rows) : seen;
        for (size_t j0 = 0; j0 < end; j0 += kKeys) {
            const Tile t(p, i0, j0, end);
            scores(t, held.keys, turned, p.width, factor, p.mask(b), s);
            weigh<Word>(t, s, r);
            t.for_queries([&](size_t i, size_t n, size_t depth) {
                multiply<Into::scale, Word>(n, padded, {s + i, 1, kQueries}, held.values.down_from(j0), padded,
                                            deep<Word>(depth), sum + i * padded, padded, r.factor + i);
            });
        }
        finish(b, h, i0, rows, r, sum);
    }

    void finish(size_t b, size_t h, size_t i0, size_t rows, const Running& r, const float* sum) const {
        for (size_t i = 0; i < rows; ++i) {
            const bool nothing = r.sum[i] == 0.0f;
            const float factor = nothing ? 0.0f : 1.0f / r.sum[i];
            const float* from = sum + i * p.padded();
            T* to = at(o, o_strides, b, h) + static_cast<ptrdiff_t>(i0 + i) * o_strides[2];
#pragma omp simd
            for (size_t e = 0; e < p.width; ++e) to[e] = narrow<T>(from[e] * factor);
            lse[(b * p.heads + h) * p.queries + i0 + i] =
                nothing ? kInfinity : r.greatest[i] + std::log2(r.sum[i]);
        }
    }

    template <typename Pointer>
    static Pointer at(Pointer x, const Strides& s, size_t b, size_t h) {
        return x + static_cast<ptrdiff_t>(b) * s[0] + static_cast<ptrdiff_t>(h) * s[1];
    }
};

}  // namespace

template <typename T>
void flash_attention(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides, Strides v_strides,
                     size_t batch, size_t heads, size_t key_heads, size_t queries, size_t keys, size_t width,
                     bool causal, float scale, const int64_t* key_lengths, const bool* key_mask, T* o,
                     Strides o_strides, float* lse, int threads) {
    const Problem p{batch, heads, key_heads, queries, keys, width, causal, scale, key_lengths, key_mask};
    const Forward<T> forward{p, q, k, v, q_strides, k_strides, v_strides, o, o_strides, lse};
    const size_t groups = groups_for(64, batch * key_heads, p.query_tiles());
    parallel_for_holding<Held<Words<T>>>(batch * key_heads * groups, threads, [&](size_t i, auto& held) {
        forward(i / groups / key_heads, i / groups % key_heads, i % groups, groups, held);
    });
}

template decltype(flash_attention<float>) flash_attention<float>;
template decltype(flash_attention<bf16>) flash_attention<bf16>;

}  // namespace mpipipe::cpu
