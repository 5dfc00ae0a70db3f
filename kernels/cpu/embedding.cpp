// One pass over the indices lists the rows, chaining the look-ups of each; then these are shared out to the threads.
#include "mpipipe/embedding.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr size_t kColumns = 1024;   // of a row, summed in the first-level cache
constexpr size_t kPiece = 1 << 15;  // elements that a piece of work moves, about
constexpr size_t kAhead = 512;      // elements before a row of the gradient it is fetched: no processor guesses which
constexpr size_t kLine = 16;        // elements that are fetched at a time

struct Row {
    int64_t index;
    size_t first, last;  // look-ups
    size_t moved;        // rows of memory that it and those before it read and write
};

// The rows that are looked up, in the order of their first look-ups: the one behind look-up i of a row is next[i].
struct Rows {
    explicit Rows(size_t n) : list(new Row[n]), next(new size_t[n]) {}

    const std::unique_ptr<Row[]> list;
    const std::unique_ptr<size_t[]> next;
    size_t count = 0;

    // False where an index is outside.
    bool link(const int64_t* indices, size_t n, int64_t padding, size_t entries) {
        int bits = 1;
        while (size_t{1} << bits < 2 * n) ++bits;
        // 1 + place of a row in the list, at the first free slot from that on to which its index is hashed; 0: free
        std::vector<size_t> slots(size_t{1} << bits);
        for (size_t i = 0; i < n; ++i) {
            const int64_t index = indices[i];
            if (static_cast<uint64_t>(index) >= entries) return false;
            if (index == padding) continue;
            size_t at = static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15 >> (64 - bits);  // Knuth 1973: 2^64 / 1.618
            while (slots[at] && list[slots[at] - 1].index != index) at = (at + 1) % slots.size();
            if (slots[at]) {
                Row& row = list[slots[at] - 1];
                row.last = next[row.last] = i;
                ++row.moved;
            } else {
                Row& row = list[count++];
                row.index = index;
                row.first = row.last = i;
                row.moved = 3;
                slots[at] = count;
            }
        }
        size_t moved = 0;
        for (size_t r = 0; r < count; ++r) list[r].moved = moved += list[r].moved;
        return true;
    }
};

void add(float* __restrict sum, const float* __restrict x, size_t n) {
#pragma omp simd
    for (size_t i = 0; i < n; ++i) sum[i] += x[i];
}

// total += sum + x, while the row `later` is fetched.
void add_both(float* __restrict total, const float* __restrict sum, const float* __restrict x, const float* later,
              size_t n) {
    size_t i = 0;
    for (; i + kLine <= n; i += kLine) {
        __builtin_prefetch(later + i, 1);
#pragma omp simd
        for (size_t j = i; j < i + kLine; ++j) total[j] += sum[j] + x[j];
    }
    for (; i < n; ++i) total[i] += sum[i] + x[i];
}

}  // namespace

bool embedding_backward(const float* dy, const int64_t* indices, size_t n, size_t d, int64_t padding, float* grad,
                        size_t entries, int threads) {
    Rows rows(n);
    if (!rows.link(indices, n, padding, entries)) return false;
    const size_t moved = rows.count ? rows.list[rows.count - 1].moved : 0;
    const size_t width = std::max<size_t>(1, d), piece = std::max<size_t>(1, kPiece / width);
    const ptrdiff_t ahead = 1 + kAhead / width;
    // by what they move, as rows that are looked up often are first in a text
    parallel_pieces(moved, piece, threads, [&, dy, d, grad, ahead](size_t from, size_t to) {
        alignas(64) float sum[kColumns] = {};  // of the look-ups of a row but the last, else 0
        const Row *const begin = rows.list.get(), *const end = begin + rows.count;
        const Row* row = std::partition_point(begin, end, [=](const Row& r) { return r.moved <= from; });
        for (; row != end && row->moved <= to; ++row) {
            const Row& later = end - row > ahead ? row[ahead] : *row;
            for (size_t at = 0; at < d; at += kColumns) {
                const auto of_grad = [=](const Row& r) { return grad + static_cast<size_t>(r.index) * d + at; };
                const size_t n = std::min(kColumns, d - at);
                size_t i = row->first;
                for (; i != row->last; i = rows.next[i]) add(sum, dy + i * d + at, n);
                add_both(of_grad(*row), sum, dy + i * d + at, of_grad(later), n);
                if (row->first != row->last) std::fill_n(sum, n, 0.0f);
            }
        }
    });
    return true;
}

}  // namespace mpipipe::cpu
