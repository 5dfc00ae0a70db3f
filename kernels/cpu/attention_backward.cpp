// Attention backward (Dao et al. 2022, Algorithm 4): the weights are made again from the scores and lse, a tile of
// keys at a time over the queries that see it.
//
//     delta_i = o_i . d_o_i      p = 2^(score - lse)      ds = p (d_o v^T - delta)
//     dv += p^T d_o      dk += scale ds^T q      dq += scale ds k
//
// A key head's tiles of keys fall into groups, so that there is work for many threads. Each group has its own dq;
// they are added in the order of the groups.
#include <cstring>
#include <vector>

#include "attention_tiles.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

template <typename T>
struct View {  // of a tensor; head(b, h) is its first token
    T* p;
    Strides strides;
    T* head(size_t b, size_t h) const {
        return p + static_cast<ptrdiff_t>(b) * strides[0] + static_cast<ptrdiff_t>(h) * strides[1];
    }
};

// to[i] = factor * from[i] for the tokens [first, last).
template <typename T>
void give(const float* from, size_t padded, size_t width, float factor, size_t first, size_t last, T* to,
          ptrdiff_t stride) {
    for (size_t i = first; i < last; ++i) {
        T* row = to + static_cast<ptrdiff_t>(i) * stride;
#pragma omp simd
        for (size_t e = 0; e < width; ++e) row[e] = narrow<T>(from[i * padded + e] * factor);
    }
}

// What the queries of one head bring: q and d_o as rows and turned, lse and delta; padded to whole tiles, with
// queries that see nothing.
struct Queries {
    Rows q, d_o;
    Floats q_turned, d_o_turned, lse, delta;

    template <typename T>
    Queries(const Problem& p, View<const T> q_, View<const T> o, View<const T> d_o_, const float* lse_, size_t b,
            size_t h)
        : q(q_.head(b, h), q_.strides[2], p.queries, p.width, p.padded()),
          d_o(d_o_.head(b, h), d_o_.strides[2], p.queries, p.width, p.padded()) {
        const size_t all = p.query_tiles() * kQueries, padded = p.padded();
        q_turned = floats(all * p.width), d_o_turned = floats(all * p.width);
        lse = floats(all), delta = zeros(all);
        std::fill_n(lse.get(), all, kInfinity);
        std::memcpy(lse.get(), lse_ + (b * p.heads + h) * p.queries, p.queries * sizeof(float));
        for (size_t i = 0; i < p.queries; ++i) {
            const T* row = o.head(b, h) + static_cast<ptrdiff_t>(i) * o.strides[2];
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (size_t e = 0; e < p.width; ++e) sum += wide(row[e]) * d_o[i][e];
            delta[i] = sum;
        }
        for (size_t i = 0; i < p.queries; i += kQueries) {
            const size_t rows = std::min(kQueries, p.queries - i);
            turn(q, i, rows, padded, p.width, p.scale * kLog2e, q_turned.get() + i * p.width);
            turn(d_o, i, rows, padded, p.width, 1.0f, d_o_turned.get() + i * p.width);
        }
    }
};

// s: scores to weights p; ds: d_o v^T to p (d_o v^T - delta).
void weigh(const Tile& t, const float* lse, const float* delta, float* s, float* ds) {
    for (size_t i = 0; i < kQueries; i += kLanes) {
        const size_t keys = t.last_key(i / kStrip * kStrip);
        const Vector l = load(lse + i), d = load(delta + i);
        for (size_t k = 0; k < keys; ++k) {
            float *weight = s + k * kQueries + i, *change = ds + k * kQueries + i;
            const Vector p = exp2_(load(weight) - l);
            store(weight, p);
            store(change, p * (load(change) - d));
        }
    }
}

template <typename T>
struct Backward {
    Problem p;
    View<const T> q, k, v, o, d_o;
    const float* lse;
    View<T> dq, dk, dv;
    size_t groups;

    size_t key_tiles() const { return (p.keys + kKeys - 1) / kKeys; }

    // dk and dv of the group's tiles of keys; returns its dq (heads of the key head, queries, padded), without scale.
    Floats run(size_t b, size_t key_head, size_t group) const {
        const size_t seen = p.seen(b), padded = p.padded(), heads = p.heads_per_key();
        const Rows keys(k.head(b, key_head), k.strides[2], seen, p.width, padded);
        const Rows values(v.head(b, key_head), v.strides[2], seen, p.width, padded);
        const Floats scratch = floats(2 * kKeys * kQueries);
        Floats dq_sum = zeros(heads * p.queries * padded);
        const Floats dk_sum = zeros(p.keys * padded), dv_sum = zeros(p.keys * padded);
        for (size_t h = 0; h < heads && seen > 0; ++h) {
            const Queries queries(p, q, o, d_o, lse, b, key_head * heads + h);
            for (size_t j = 0; j * kKeys < seen; ++j) {
                if (!belongs(j, key_tiles(), groups, group)) continue;
                for (size_t i = p.causal ? j * kKeys / kQueries : 0; i * kQueries < p.queries; ++i) {
                    tile(Tile(p, i * kQueries, j * kKeys, seen), keys, values, queries, p.mask(b), scratch.get(),
                         dq_sum.get() + h * p.queries * padded, dk_sum.get(), dv_sum.get());
                }
            }
        }
        for (size_t j = 0; j < key_tiles(); ++j) {
            if (!belongs(j, key_tiles(), groups, group)) continue;
            const size_t last = std::min(p.keys, (j + 1) * kKeys);
            give(dk_sum.get(), padded, p.width, p.scale, j * kKeys, last, dk.head(b, key_head), dk.strides[2]);
            give(dv_sum.get(), padded, p.width, 1.0f, j * kKeys, last, dv.head(b, key_head), dv.strides[2]);
        }
        return dq_sum;
    }

    void tile(const Tile& t, const Rows& keys, const Rows& values, const Queries& queries, const bool* mask, float* s,
              float* dq_sum, float* dk_sum, float* dv_sum) const {
        const size_t padded = p.padded();
        float* ds = s + kKeys * kQueries;
        scores(t, keys, padded, queries.q_turned.get() + t.i0 * p.width, p.width, mask, s);
        const float* d_o_turned = queries.d_o_turned.get() + t.i0 * p.width;
        t.for_keys([&](size_t k, size_t n, size_t i) {
            multiply<Into::set>(n, kQueries - i, {values[t.j0 + k], padded, 1}, d_o_turned + i, kQueries, p.width,
                                ds + k * kQueries + i, kQueries);
        });
        weigh(t, queries.lse.get() + t.i0, queries.delta.get() + t.i0, s, ds);
        t.for_keys([&](size_t k, size_t n, size_t i) {
            if (i >= t.rows) return;
            const size_t at = k * kQueries + i, to = (t.j0 + k) * padded;
            multiply<Into::add>(n, padded, {s + at, kQueries, 1}, queries.d_o[t.i0 + i], padded, t.rows - i,
                                dv_sum + to, padded);
            multiply<Into::add>(n, padded, {ds + at, kQueries, 1}, queries.q[t.i0 + i], padded, t.rows - i,
                                dk_sum + to, padded);
        });
        t.for_queries([&](size_t i, size_t n, size_t depth) {
            multiply<Into::add>(n, padded, {ds + i, 1, kQueries}, keys[t.j0], padded, depth,
                                dq_sum + (t.i0 + i) * padded, padded);
        });
    }

    // dq = scale * the sum of what the groups found, one after the other.
    void finish(size_t b, size_t key_head, Floats* sums) const {
        const size_t heads = p.heads_per_key(), padded = p.padded(), n = heads * p.queries * padded;
        float* total = sums[0].get();
        for (size_t group = 1; group < groups; ++group) {
            const float* more = sums[group].get();
#pragma omp simd
            for (size_t i = 0; i < n; ++i) total[i] += more[i];
        }
        for (size_t h = 0; h < heads; ++h) {
            give(total + h * p.queries * padded, padded, p.width, p.scale, 0, p.queries,
                 dq.head(b, key_head * heads + h), dq.strides[2]);
        }
        for (size_t group = 0; group < groups; ++group) sums[group].reset();
    }
};

}  // namespace

template <typename T>
void attention_backward(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides, Strides v_strides,
                        size_t batch, size_t heads, size_t key_heads, size_t queries, size_t keys, size_t width,
                        bool causal, float scale, const int64_t* key_lengths, const bool* key_mask, const T* o,
                        Strides o_strides, const float* lse, const T* d_o, Strides d_o_strides, T* dq,
                        Strides dq_strides, T* dk, Strides dk_strides, T* dv, Strides dv_strides, int threads) {
    const Problem p{batch, heads, key_heads, queries, keys, width, causal, scale, key_lengths, key_mask};
    const size_t groups = groups_for(16, batch * key_heads, (keys + kKeys - 1) / kKeys);
    const Backward<T> backward{p, {q, q_strides}, {k, k_strides}, {v, v_strides}, {o, o_strides}, {d_o, d_o_strides},
                               lse, {dq, dq_strides}, {dk, dk_strides}, {dv, dv_strides}, groups};
    std::vector<Floats> sums(batch * key_heads * groups);
    parallel_for(sums.size(), threads, [&](size_t i) {
        const size_t head = i / groups;
        sums[i] = backward.run(head / key_heads, head % key_heads, i % groups);
        if (groups == 1) backward.finish(head / key_heads, head % key_heads, &sums[i]);  // nothing to wait for
    });
    parallel_for(groups == 1 ? 0 : batch * key_heads, threads, [&](size_t head) {
        backward.finish(head / key_heads, head % key_heads, &sums[head * groups]);
    });
}

template void attention_backward<float>(const float*, const float*, const float*, Strides, Strides, Strides, size_t,
                                        size_t, size_t, size_t, size_t, size_t, bool, float, const int64_t*,
                                        const bool*, const float*, Strides, const float*, const float*, Strides,
                                        float*, Strides, float*, Strides, float*, Strides, int);
template void attention_backward<bf16>(const bf16*, const bf16*, const bf16*, Strides, Strides, Strides, size_t,
                                       size_t, size_t, size_t, size_t, size_t, bool, float, const int64_t*,
                                       const bool*, const bf16*, Strides, const float*, const bf16*, Strides, bf16*,
                                       Strides, bf16*, Strides, bf16*, Strides, int);

}  // namespace mpipipe::cpu
