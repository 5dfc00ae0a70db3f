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

#include "mpipipe/flash_attention.h"
#include "mpipipe/floats.h"
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

// With other heads between a head's tokens, the processor does not foresee which cache lines come next. Those of what
// is read next are asked for in the first-level cache, which has few requests under way at once; those of what is
// written later in the second-level one, which has many.
enum class Level { first = 3, second = 2 };

template <Level level, typename T>
void foresee(const T* x, ptrdiff_t stride, size_t n, size_t width) {
    for (size_t i = 0; i < n; ++i, x += stride) {
        for (size_t e = 0; e < width; e += 64 / sizeof(T)) __builtin_prefetch(x + e, 0, static_cast<int>(level));
    }
}

// body(i, row i) for every `step`th of n rows that are read.
template <size_t step = 1, typename T, typename Body>
void for_rows(const T* x, ptrdiff_t stride, size_t n, size_t width, Body body) {
    constexpr size_t kAhead = 8;  // rows
    for (size_t i = 0; i < n; i += step, x += static_cast<ptrdiff_t>(step) * stride) {
        if (i + kAhead < n) {
            const T* ahead = x + static_cast<ptrdiff_t>(kAhead) * stride;
            foresee<Level::first>(ahead, stride, std::min(step, n - i - kAhead), width);
        }
        body(i, x);
    }
}

// Words that a depth of n takes.
template <typename Word>
constexpr size_t deep(size_t n) {
    return (n + Word::kDepth - 1) / Word::kDepth;
}

// The tokens of one head as factors of products, padded with zeros. The depth of a product is the width, along rows, or
// the tokens, which go down: of Singles both are the same rows in float32, the tensor itself where it already is so and
// its rows lie side by side (far apart, at a power of two, they would share few sets of the cache), else a copy. A copy
// takes the memory of the one before it.
template <typename Word>
class Tokens {
   public:
    enum Need { rows = 1, down = 2, both = 3 };  // both without more work for Singles

    template <typename T>
    void take(const T* x, ptrdiff_t stride, size_t n, size_t width, size_t padded, Need need) {
        padded_ = padded;
        if constexpr (Word::kDepth == 1) {
            if constexpr (std::is_same_v<T, float>) {
                rows_ = down_ = x;
                if (width == padded && stride == static_cast<ptrdiff_t>(width)) return;
            }
            float* to = row_copy_.of(n * padded);
            for_rows(x, stride, n, width, [&](size_t, const T* from) {
#pragma omp simd
                for (size_t e = 0; e < width; ++e) to[e] = wide(from[e]);
                std::fill(to + width, to + padded, 0.0f);
                to += padded;
            });
            rows_ = down_ = row_copy_.of(n * padded);
        } else {
            if (need & rows) take_rows(x, stride, n, width);
            if (need & down) take_down(x, stride, n, width);
        }
    }
    // Of token i: padded / kDepth words.
    const float* row(size_t i) const { return rows_ + i * row_words(); }
    size_t row_words() const { return padded_ / Word::kDepth; }
    // Of the tokens from i on, which kDepth divides: padded words of kDepth tokens each.
    const float* down_from(size_t i) const { return down_ + i / Word::kDepth * padded_; }

   private:
    struct Copy {
        Floats at;
        size_t room = 0;
        float* of(size_t n) {
            if (n > room) at = floats(room = n);
            return at.get();
        }
    };

    void take_rows(const bf16* x, ptrdiff_t stride, size_t n, size_t width) {
        float* to = row_copy_.of(n * row_words());
        rows_ = to;
        for_rows(x, stride, n, width, [&](size_t, const bf16* from) {
            to[(width - 1) / Word::kDepth] = 0.0f;  // of an odd width, half of the last word
            std::memcpy(to, from, width * sizeof(bf16));
            std::fill(to + deep<Word>(width), to + row_words(), 0.0f);
            to += row_words();
        });
    }

    void take_down(const bf16* x, ptrdiff_t stride, size_t n, size_t width) {
        float* to = down_copy_.of(deep<Word>(n) * padded_);
        down_ = to;
        for_rows<Word::kDepth>(x, stride, n, width, [&](size_t i, const bf16* first) {
            const bf16* second = first + (i + 1 < n ? stride : 0);
            const uint32_t there = i + 1 < n ? 0xFFFF0000 : 0;
#pragma omp simd
            for (size_t e = 0; e < width; ++e) {
                const uint32_t word = (uint32_t{second[e].bits} << 16 & there) | first[e].bits;
                std::memcpy(to + e, &word, sizeof word);
            }
            std::fill(to + width, to + padded_, 0.0f);
            to += padded_;
        });
    }

    size_t padded_ = 0;
    const float *rows_ = nullptr, *down_ = nullptr;
    Copy row_copy_, down_copy_;
};

// Up to kQueries rows as the columns of `to` (words of the width, kQueries), of Singles times `factor`; columns from n
// on are 0.
template <typename Word>
void turn(const Tokens<Word>& tokens, size_t first, size_t n, size_t width, float factor, float* to) {
    const auto each = [factor](auto x) { return Word::kDepth == 1 ? x * factor : x; };
    for (size_t i = 0; i < kQueries; i += kLanes) {
        transpose(tokens.row(first + std::min(i, n)), tokens.row_words(), n > i ? n - i : 0, deep<Word>(width), each,
                  to + i, kQueries);
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

// s (kKeys, kQueries) = factor k q^T, -inf where the mask of keys or the diagonal hides it; what no strip has is not
// written. factor: scale log2(e), which the turned queries of Singles have in them.
template <typename Word>
void scores(const Tile& t, const Tokens<Word>& k, const float* turned, size_t width, float factor, const bool* mask,
            float* s) {
    constexpr Into into = Word::kDepth == 1 ? Into::set : Into::times;
    t.for_keys([&](size_t first, size_t n, size_t column) {
        float* to = s + first * kQueries;
        multiply<into, Word>(n, kQueries - column, {k.row(t.j0 + first), k.row_words(), 1}, turned + column, kQueries,
                             deep<Word>(width), to + column, kQueries, &factor);
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
