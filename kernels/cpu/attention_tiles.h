// What both directions of attention share: how a problem falls into tiles, and the scores of one.
//
// A tile of scores is held transposed, kKeys rows of kQueries columns: the softmax of a query then runs down a
// column, lane by lane, and of all the factors of the products only the queries need turning:
//
//     scores (keys, queries)  = k q^T          o (queries, width) = scores^T v
//
// On the causal diagonal work is cut in strips of kStrip rows: a strip starts at its first column that is seen.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <new>

#include "mpipipe/attention.h"
#include "mpipipe/vectors.h"

namespace mpipipe::cpu {

constexpr size_t kQueries = 64, kKeys = 64, kStrip = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504f;

struct Problem {
    size_t batch, heads, key_heads, queries, keys, width;
    bool causal;
    float scale;
    const int64_t* key_lengths;
    const bool* key_mask;

    size_t heads_per_key() const { return heads / key_heads; }
    size_t query_tiles() const { return (queries + kQueries - 1) / kQueries; }
    // Keys of sample b that any query may see: those from here on are never read.
    size_t seen(size_t b) const {
        const size_t length = key_lengths ? static_cast<size_t>(key_lengths[b]) : keys;
        return causal ? std::min(length, queries) : length;
    }
    const bool* mask(size_t b) const { return key_mask ? key_mask + b * keys : nullptr; }
    // Widths are padded to what `multiply` has good blocks for: 16, 32, 48, 64, 80, 96 and multiples of 64.
    size_t padded() const {
        const size_t strips = (width + 15) / 16;
        return 16 * (strips > 6 ? (strips + 3) / 4 * 4 : strips);
    }
};

// Tile t of n belongs to one of `groups`: early and late ones paired, as with a causal mask their work differs.
inline bool belongs(size_t t, size_t n, size_t groups, size_t group) {
    return std::min(t, n - 1 - t) % groups == group;
}

// So many groups of `tiles` that there are `pieces` of work over all samples and heads. Of sizes alone.
inline size_t groups_for(size_t pieces, size_t heads, size_t tiles) {
    const size_t wanted = (pieces + heads - 1) / std::max<size_t>(heads, 1);
    return std::max<size_t>(1, std::min(wanted, (tiles + 1) / 2));
}

struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};
using Floats = std::unique_ptr<float[], Free>;

inline Floats floats(size_t n) {
    return Floats(static_cast<float*>(::operator new[](std::max<size_t>(n, 1) * sizeof(float), std::align_val_t{64})));
}

inline Floats zeros(size_t n) {
    Floats x = floats(n);
    std::fill_n(x.get(), n, 0.0f);
    return x;
}

constexpr size_t kAhead = 16;  // tokens, of which the cache lines are asked for: with other heads between a head's
                               // tokens, the processor does not foresee them

// The tokens of one head in float32, padded with zeros: the tensor itself where it already is so and its rows lie
// side by side (far apart, at a power of two, they would share few sets of the cache), else a copy, in the memory of
// the copy before it.
class Rows {
   public:
    template <typename T>
    void take(const T* x, ptrdiff_t stride, size_t n, size_t width, size_t padded) {
        padded_ = padded;
        if constexpr (std::is_same_v<T, float>) {
            at_ = x;
            if (width == padded && stride == static_cast<ptrdiff_t>(width)) return;
        }
        if (n * padded > room_) copy_ = floats(room_ = n * padded);
        for (size_t i = 0; i < n; ++i) {
            const T* from = x + static_cast<ptrdiff_t>(i) * stride;
            float* to = copy_.get() + i * padded;
            for (size_t e = 0; i + kAhead < n && e < width; e += 64 / sizeof(T)) {
                __builtin_prefetch(from + static_cast<ptrdiff_t>(kAhead) * stride + e);
            }
#pragma omp simd
            for (size_t e = 0; e < width; ++e) to[e] = wide(from[e]);
            std::fill(to + width, to + padded, 0.0f);
        }
        at_ = copy_.get();
    }
    const float* operator[](size_t i) const { return at_ + i * padded_; }

   private:
    size_t padded_ = 0, room_ = 0;
    const float* at_ = nullptr;
    Floats copy_;
};

// Up to kQueries rows as the columns of `to` (width, kQueries), times `factor`; columns from n on are 0.
inline void turn(const Rows& rows, size_t first, size_t n, size_t stride, size_t width, float factor, float* to) {
    for (size_t i = 0; i < kQueries; i += kLanes) {
        transpose(rows[first + std::min(i, n)], stride, n > i ? n - i : 0, width, factor, to + i, kQueries);
    }
}

// Where the queries i0 + [0, rows) meet the keys j0 + [0, n).
struct Tile {
    size_t i0, rows, j0, n;
    bool diagonal;  // some query does not see some key, by the causal mask

    Tile(const Problem& p, size_t i0, size_t j0, size_t seen)
        : i0(i0), rows(std::min(kQueries, p.queries - i0)), j0(j0), n(std::min(kKeys, seen - j0)),
          diagonal(p.causal && j0 + n > i0 + 1) {}

    // The first column to compute for the strip of keys at k; kQueries: none.
    size_t first_query(size_t k) const {
        return diagonal && j0 + k > i0 ? std::min(kQueries, (j0 + k - i0) / kStrip * kStrip) : 0;
    }
    // How many keys the strip of queries at i computes.
    size_t last_key(size_t i) const {
        if (!diagonal) return n;
        return i0 + i + kStrip > j0 ? std::min(n, i0 + i + kStrip - j0) : 0;
    }
    // body(k, keys, first query) for all, strip by strip on the diagonal.
    template <typename Body>
    void for_keys(Body body) const {
        const size_t step = diagonal ? kStrip : n;
        for (size_t k = 0; k < n; k += step) {
            const size_t first = first_query(k);
            if (first < kQueries) body(k, std::min(step, n - k), first);
        }
    }
    // body(i, queries, keys) likewise.
    template <typename Body>
    void for_queries(Body body) const {
        const size_t step = diagonal ? kStrip : rows;
        for (size_t i = 0; i < rows; i += step) {
            const size_t keys = last_key(i);
            if (keys > 0) body(i, std::min(step, rows - i), keys);
        }
    }
};

// s (kKeys, kQueries) = k turned, -inf where the mask of keys or the diagonal hides it; what no strip has is not
// written. s is in units of log2: `turned` has the scale in it.
inline void scores(const Tile& t, const Rows& k, size_t stride, const float* turned, size_t width, const bool* mask,
                   float* s) {
    t.for_keys([&](size_t first, size_t n, size_t column) {
        float* to = s + first * kQueries;
        multiply<Into::set>(n, kQueries - column, {k[t.j0 + first], stride, 1}, turned + column, kQueries, width,
                            to + column, kQueries);
        for (size_t j = 0; t.diagonal && j < n; ++j) {
            const size_t key = t.j0 + first + j, hidden = key > t.i0 ? std::min(key - t.i0, kQueries) : 0;
            if (hidden > column) std::fill(to + j * kQueries + column, to + j * kQueries + hidden, -kInfinity);
        }
        for (size_t j = 0; mask && j < n; ++j) {
            if (!mask[t.j0 + first + j]) std::fill_n(to + j * kQueries + column, kQueries - column, -kInfinity);
        }
    });
}

}  // namespace mpipipe::cpu
