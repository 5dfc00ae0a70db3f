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

#include "flash_attention_tiles.h"
#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kTogether = 4;  // tiles of keys: with width 64, 256 KiB of k, v, dk and dv in the second-level cache

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
        if (i % kKeys == 0) foresee<Level::second>(row, stride, std::min(last - i, kKeys), width);
#pragma omp simd
        for (size_t e = 0; e < width; ++e) row[e] = narrow<T>(from[i * padded + e] * factor);
    }
}

// What the queries of one head bring: q and d_o as rows and turned, lse and delta; padded to whole tiles, with
// queries that see nothing. The next head takes the place of the last one.
template <typename Word>
struct Queries {
    Tokens<Word> q, d_o;
    Floats q_turned, d_o_turned, lse, delta;

    template <typename T>
    void take(const Problem& p, View<const T> q_, View<const T> o, View<const T> d_o_, const float* lse_, size_t b,
              size_t h) {
        const size_t all = p.query_tiles() * kQueries, padded = p.padded();
        q.take(q_.head(b, h), q_.strides[2], p.queries, p.width, padded, Tokens<Word>::both);
        d_o.take(d_o_.head(b, h), d_o_.strides[2], p.queries, p.width, padded, Tokens<Word>::both);
        if (!lse) {
            q_turned = floats(all * p.width), d_o_turned = floats(all * p.width);
            lse = floats(all), delta = zeros(all);
            std::fill_n(lse.get(), all, kInfinity);
        }
        std::memcpy(lse.get(), lse_ + (b * p.heads + h) * p.queries, p.queries * sizeof(float));
        for_rows(o.head(b, h), o.strides[2], p.queries, p.width, [&](size_t i, const T* row) {
            const T* d_row = d_o_.head(b, h) + static_cast<ptrdiff_t>(i) * d_o_.strides[2];
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (size_t e = 0; e < p.width; ++e) sum += wide(row[e]) * wide(d_row[e]);
            delta[i] = sum;
        });
        for (size_t i = 0; i < p.queries; i += kQueries) {
            const size_t rows = std::min(kQueries, p.queries - i);
            turn(q, i, rows, p.width, p.scale * kLog2e, q_turned.get() + i * p.width);
            turn(d_o, i, rows, p.width, 1.0f, d_o_turned.get() + i * p.width);
        }
    }
};

// What a thread keeps: consecutive pieces of work are most often of one head.
template <typename Word>
struct Held {
    size_t key_head = SIZE_MAX, head = SIZE_MAX;
    Tokens<Word> keys, values;
    Queries<Word> queries;
    Floats scratch, dk, dv, dq;
};

// s: scores to weights p; ds: d_o v^T to p (d_o v^T - delta). Of Pairs both become words of two queries, in the lower
// halves of their rows, and `down` (kKeys / 2, kQueries) has words of two keys of ds; `down` of Singles is ds itself.
template <typename Word>
[[gnu::noinline]] void weigh(const Tile& t, const float* lse, const float* delta, float* s, float* ds, float* down) {
    for (size_t i = 0; i < kQueries; i += kLanes) {
        const size_t keys = t.last_key(i / kStrip * kStrip);
        const Vector l = load(lse + i), d = load(delta + i);
        const auto weight = [&](size_t k) { return exp2_(load(s + k * kQueries + i) - l); };
        const auto change = [&](size_t k, Vector p) { return p * (load(ds + k * kQueries + i) - d); };
        if constexpr (Word::kDepth == 1) {
            for (size_t k = 0; k < keys; ++k) {
                const Vector p = weight(k);
                store(s + k * kQueries + i, p);
                store(ds + k * kQueries + i, change(k, p));
            }
        } else {
            for (size_t k = 0; k < keys; k += 2) {  // of an odd number the last one beside zeros
                const bool two = k + 1 < keys;
                const Vector p0 = weight(k), p1 = two ? weight(k + 1) : Vector{};
                const auto c = Word::round(change(k, p0), two ? change(k + 1, p1) : Vector{});
                const size_t row = k * kQueries + i / 2;
                Word::store(Word::round(p0, p1), s + row, s + row + kQueries);
                Word::store(c, ds + row, ds + row + kQueries);
                store(down + k / 2 * kQueries + i, Word::zip(c));
            }
        }
    }
}

template <typename T>
struct Backward {
    using Word = Words<T>;

    Problem p;
    View<const T> q, k, v, o, d_o;
    const float* lse;
    View<T> dq, dk, dv;
    size_t groups;

    size_t key_tiles() const { return (p.keys + kKeys - 1) / kKeys; }
    size_t dq_size() const { return p.heads_per_key() * p.queries * p.padded(); }

    // dk and dv of the group's tiles of keys, and its dq (heads of the key head, queries, padded) without scale.
    void run(size_t b, size_t key_head, size_t group, Held<Word>& held, float* dq_sum) const {
        const size_t seen = p.seen(b), padded = p.padded(), heads = p.heads_per_key();
        if (held.key_head != b * p.key_heads + key_head) {
            held.key_head = b * p.key_heads + key_head;
            held.keys.take(k.head(b, key_head), k.strides[2], seen, p.width, padded, Tokens<Word>::both);
            held.values.take(v.head(b, key_head), v.strides[2], seen, p.width, padded, Tokens<Word>::rows);
        }
        if (!held.scratch) {
            held.scratch = floats((Word::kDepth == 1 ? 4 : 5) * kKeys * kQueries / 2);
            held.dk = floats(p.keys * padded), held.dv = floats(p.keys * padded);
        }
        std::fill_n(dq_sum, dq_size(), 0.0f);
        std::vector<size_t> own;
        for (size_t j = 0; j < key_tiles(); ++j) {
            if (!belongs(j, key_tiles(), groups, group)) continue;
            const size_t first = j * kKeys * padded, last = std::min(p.keys, (j + 1) * kKeys) * padded;
            std::fill(held.dk.get() + first, held.dk.get() + last, 0.0f);
            std::fill(held.dv.get() + first, held.dv.get() + last, 0.0f);
            own.push_back(j);
        }
        for (size_t h = 0; h < heads && seen > 0; ++h) {
            const size_t head = b * p.heads + key_head * heads + h;
            if (held.head != head) {
                held.head = head;
                held.queries.take(p, q, o, d_o, lse, b, key_head * heads + h);
            }
            for (size_t first = 0; first < own.size(); first += kTogether) {
                const size_t last = std::min(own.size(), first + kTogether);
                meet(b, own.data() + first, own.data() + last, seen, held, dq_sum + h * p.queries * padded);
            }
        }
        for (const size_t j : own) {
            const size_t last = std::min(p.keys, (j + 1) * kKeys);
            give(held.dk.get(), padded, p.width, p.scale, j * kKeys, last, dk.head(b, key_head), dk.strides[2]);
            give(held.dv.get(), padded, p.width, 1.0f, j * kKeys, last, dv.head(b, key_head), dv.strides[2]);
        }
    }

    // Some tiles of keys, ascending, by all queries that see them: each tile of queries is read once for all of them.
    void meet(size_t b, const size_t* first, const size_t* last, size_t seen, Held<Word>& held, float* dq_sum) const {
        for (size_t i = p.causal ? *first * kKeys / kQueries : 0; i * kQueries < p.queries; ++i) {
            for (const size_t* j = first; j < last; ++j) {
                if (*j * kKeys >= seen || (p.causal && i < *j * kKeys / kQueries)) break;
                tile(Tile(p, i * kQueries, *j * kKeys, seen), held.keys, held.values, held.queries, p.mask(b),
                     held.scratch.get(), dq_sum, held.dk.get(), held.dv.get());
            }
        }
    }

    void tile(const Tile& t, const Tokens<Word>& keys, const Tokens<Word>& values, const Queries<Word>& queries,
              const bool* mask, float* s, float* dq_sum, float* dk_sum, float* dv_sum) const {
        const size_t padded = p.padded(), width = deep<Word>(p.width);
        float *ds = s + kKeys * kQueries, *ds_down = Word::kDepth == 1 ? ds : ds + kKeys * kQueries;
        scores(t, keys, queries.q_turned.get() + t.i0 * p.width, p.width, p.scale * kLog2e, mask, s);
        const float* d_o_turned = queries.d_o_turned.get() + t.i0 * p.width;
        t.for_keys([&](size_t k, size_t n, size_t i) {
            multiply<Into::set, Word>(n, kQueries - i, {values.row(t.j0 + k), values.row_words(), 1}, d_o_turned + i,
                                      kQueries, width, ds + k * kQueries + i, kQueries);
        });
        weigh<Word>(t, queries.lse.get() + t.i0, queries.delta.get() + t.i0, s, ds, ds_down);
        t.for_keys([&](size_t k, size_t n, size_t i) {
            if (i >= t.rows) return;
            const size_t at = k * kQueries + i / Word::kDepth, to = (t.j0 + k) * padded, depth = deep<Word>(t.rows - i);
            multiply<Into::add, Word>(n, padded, {s + at, kQueries, 1}, queries.d_o.down_from(t.i0 + i), padded, depth,
                                      dv_sum + to, padded);
            multiply<Into::add, Word>(n, padded, {ds + at, kQueries, 1}, queries.q.down_from(t.i0 + i), padded, depth,
                                      dk_sum + to, padded);
        });
        t.for_queries([&](size_t i, size_t n, size_t depth) {
            multiply<Into::add, Word>(n, padded, {ds_down + i, 1, kQueries}, keys.down_from(t.j0), padded,
                                      deep<Word>(depth), dq_sum + (t.i0 + i) * padded, padded);
        });
    }

    // dq = scale * the sum of what the groups found, one after the other.
    void finish(size_t b, size_t key_head, const Floats* sums) const {
        const size_t heads = p.heads_per_key(), padded = p.padded(), n = dq_size();
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
    }
};

}  // namespace

template <typename T>
void flash_attention_backward(const T* q, const T* k, const T* v, Strides q_strides, Strides k_strides,
                              Strides v_strides, size_t batch, size_t heads, size_t key_heads, size_t queries,
                              size_t keys, size_t width, bool causal, float scale, const int64_t* key_lengths,
                              const bool* key_mask, const T* o, Strides o_strides, const float* lse, const T* d_o,
                              Strides d_o_strides, T* dq, Strides dq_strides, T* dk, Strides dk_strides, T* dv,
                              Strides dv_strides, int threads) {
    const Problem p{batch, heads, key_heads, queries, keys, width, causal, scale, key_lengths, key_mask};
    const size_t groups = groups_for(16, batch * key_heads, (keys + kKeys - 1) / kKeys);
    const Backward<T> backward{p, {q, q_strides}, {k, k_strides}, {v, v_strides}, {o, o_strides}, {d_o, d_o_strides},
                               lse, {dq, dq_strides}, {dk, dk_strides}, {dv, dv_strides}, groups};
    std::vector<Floats> sums(groups == 1 ? 0 : batch * key_heads * groups);
    parallel_for_holding<Held<Words<T>>>(batch * key_heads * groups, threads, [&](size_t i, auto& held) {
        const size_t head = i / groups;
        Floats& sum = groups == 1 ? held.dq : sums[i];
        if (!sum) sum = floats(backward.dq_size());
        backward.run(head / key_heads, head % key_heads, i % groups, held, sum.get());
        if (groups == 1) backward.finish(head / key_heads, head % key_heads, &sum);  // nothing to wait for
    });
    parallel_for(groups == 1 ? 0 : batch * key_heads, threads, [&](size_t head) {
        backward.finish(head / key_heads, head % key_heads, &sums[head * groups]);
    });
}

template decltype(flash_attention_backward<float>) flash_attention_backward<float>;
template decltype(flash_attention_backward<bf16>) flash_attention_backward<bf16>;

}  // namespace mpipipe::cpu
