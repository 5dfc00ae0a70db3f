// For a part of the depth, b is packed a panel of kColumns at a time, which all rows of a meet in blocks of c that stay
// in registers. Rows of a are read as they are, columns are packed in panels of kRows.
#include "mpipipe/gemm.h"

#include <algorithm>

#include "mpipipe/floats.h"
#include "mpipipe/threads.h"
#include "mpipipe/vectors.h"

namespace mpipipe::cpu {
namespace {

constexpr int kRows = 6, kVectors = kLanes < 16 ? 2 : 4;  // as `multiply` has them, for 16 and for 32 registers
constexpr size_t kColumns = kVectors * kLanes;
// At once; more fall into equal parts. With these a panel of b stays in the second-level cache, and c, which each part
// reads and writes, comes by seldom.
constexpr size_t kMostDepth = 768, kMostRows = 170 * kRows;
constexpr size_t kLittle = 1 << 16;  // multiply-adds, some microseconds
constexpr size_t kAhead = 8;  // rows of b that are fetched before they are copied

struct Matrix {  // element (i, k) at p[i * row + k * column]; one of the two is 1
    const float* p;
    size_t row, column;
    Matrix at(size_t i, size_t k) const { return {p + i * row + k * column, row, column}; }
};

// to[k * kRows + i], panel by panel, of columns that lie side by side; rows that are not there are not written.
void pack_rows(Matrix a, size_t m, size_t depth, float* to) {
    for (size_t first = 0; first < m; first += kRows, to += kRows * depth) {
        const size_t rows = std::min<size_t>(kRows, m - first);
        const float* from = a.p + first;
        for (size_t k = 0; k < depth; ++k, from += a.column) {
            if (rows == kRows) {
                for (size_t i = 0; i < kRows; ++i) to[k * kRows + i] = from[i];
                __builtin_prefetch(from + 4 * kRows);  // for a later panel: no stream that the processor foresees
            } else {
                for (size_t i = 0; i < rows; ++i) to[k * kRows + i] = from[i];
            }
        }
    }
}

// to[k * kColumns + j]; columns that are not there are 0.
void pack_columns(Matrix b, size_t n, size_t depth, float* to) {
    if (b.column != 1) {
        for (size_t j = 0; j < kColumns; j += kLanes) {
            transpose(b.p + std::min(j, n) * b.column, b.column, n > j ? n - j : 0, depth, [](auto x) { return x; },
                      to + j, kColumns);
        }
        return;
    }
    for (size_t k = 0; k < depth; ++k) {
        const float* from = b.p + k * b.row;
        if (k + kAhead < depth) {
            for (size_t j = 0; j < n; j += 16) __builtin_prefetch(from + kAhead * b.row + j);
        }
        if (n == kColumns) {
            for (size_t j = 0; j < kColumns; j += kLanes) store(to + k * kColumns + j, load(from + j));
        } else {
            std::fill(std::copy_n(from, n, to + k * kColumns), to + (k + 1) * kColumns, 0.0f);
        }
    }
}

// A block of up to kRows x kColumns.
template <Into into, int rows = kRows>
void block_of(size_t m, Left a, const float* b, size_t depth, float* c, size_t c_row, const float* bias) {
    if (m == rows) {
        block<into, Singles, rows, kVectors>(a, b, kColumns, depth, c, c_row, bias);
    } else if constexpr (rows > 1) {
        block_of<into, rows - 1>(m, a, b, depth, c, c_row, bias);
    }
}

void block_of(bool add, const float* bias, size_t m, Left a, const float* b, size_t depth, float* c, size_t c_row) {
    const auto run = add ? block_of<Into::add> : bias ? block_of<Into::offset> : block_of<Into::set>;
    run(m, a, b, depth, c, c_row, bias);
}

// A panel of n columns for all m rows; those of a follow each other at a distance of `next_rows`.
void panel(bool add, const float* bias, size_t m, size_t n, Left a, size_t next_rows, const float* b, size_t depth,
           float* c, size_t c_row) {
    for (size_t i = 0; i < m; i += kRows, a.p += next_rows, c += kRows * c_row) {
        const size_t rows = std::min<size_t>(kRows, m - i);
        if (n == kColumns) {
            for (size_t next = kRows; next < std::min<size_t>(2 * kRows, m - i); ++next) {
                for (size_t j = 0; j < kColumns; j += 16) __builtin_prefetch(c + next * c_row + j, 1);
            }
            block_of(add, bias, rows, a, b, depth, c, c_row);
            continue;
        }
        alignas(64) float whole[kRows * kColumns] = {}, offset[kColumns] = {};  // as wide as a block
        if (add) {
            for (size_t r = 0; r < rows; ++r) std::copy_n(c + r * c_row, n, whole + r * kColumns);
        } else if (bias) {
            std::copy_n(bias, n, offset);
        }
        block_of(add, bias ? offset : nullptr, rows, a, b, depth, whole, kColumns);
        for (size_t r = 0; r < rows; ++r) std::copy_n(whole + r * kColumns, n, c + r * c_row);
    }
}

// Size of equal parts of `whole` of `most` at most; a multiple of `unit`, and not 0.
size_t part(size_t whole, size_t most, size_t unit) {
    const size_t parts = std::max<size_t>(1, (whole + most - 1) / most);
    return std::max<size_t>(1, (whole + parts * unit - 1) / (parts * unit)) * unit;
}

void product(Matrix a, Matrix b, const float* bias, float* c, size_t c_row, size_t m, size_t n, size_t depth,
             bool add) {
    // as large as the largest product needs and kept, so that no call waits for pages of memory
    static thread_local const Floats kept = floats((kMostRows + kColumns) * kMostDepth);
    float *const packed_rows = kept.get(), *const packed_columns = packed_rows + kMostRows * kMostDepth;
    const size_t step = part(m, kMostRows, kRows), deepest = part(depth, kMostDepth, 1);
    for (size_t i = 0; i < m; i += step) {
        const size_t rows = std::min(step, m - i);
        for (size_t k = 0; k == 0 || k < depth; k += deepest) {
            const size_t deep = std::min(deepest, depth - k);
            const Matrix of_a = a.at(i, k);
            const bool packs = of_a.column != 1;  // else its rows are as good as a panel
            if (packs) pack_rows(of_a, rows, deep, packed_rows);
            const Left left = packs ? Left{packed_rows, 1, kRows} : Left{of_a.p, of_a.row, 1};
            const size_t next_rows = kRows * (packs ? deep : of_a.row);
            for (size_t j = 0; j < n; j += kColumns) {
                const size_t columns = std::min(kColumns, n - j);
                pack_columns(b.at(k, j), columns, deep, packed_columns);
                panel(add || k > 0, bias ? bias + j : nullptr, rows, columns, left, next_rows, packed_columns, deep,
                      c + i * c_row + j, c_row);
            }
        }
    }
}

size_t share(size_t units, size_t of, size_t i) { return units * i / of; }

}  // namespace

void gemm(const float* a, size_t a_row, size_t a_column, const float* b, size_t b_row, size_t b_column,
          const float* bias, float* c, size_t c_row, size_t m, size_t n, size_t depth, bool add, int threads) {
    // a grid of threads over c, in whole panels, for which least is packed; one of them, where all is done sooner
    const size_t all = m * n * depth < kLittle ? 1 : static_cast<size_t>(std::max(threads, 1));
    const size_t row_panels = (m + kRows - 1) / kRows, column_panels = (n + kColumns - 1) / kColumns;
    size_t down = 1, least = SIZE_MAX;
    for (size_t d = 1; d <= all; ++d) {
        if (all % d) continue;
        const size_t each = (row_panels + d - 1) / d * kRows + (column_panels + all / d - 1) / (all / d) * kColumns;
        if (each < least) least = each, down = d;
    }
    const size_t across = all / down;
    parallel_for(all, threads, [&](size_t piece) {
        const size_t i = piece / across, j = piece % across;
        const size_t top = share(row_panels, down, i) * kRows, left = share(column_panels, across, j) * kColumns;
        const size_t bottom = std::min(m, share(row_panels, down, i + 1) * kRows);
        const size_t right = std::min(n, share(column_panels, across, j + 1) * kColumns);
        if (top >= bottom || left >= right) return;
        product(Matrix{a, a_row, a_column}.at(top, 0), Matrix{b, b_row, b_column}.at(0, left),
                bias ? bias + left : nullptr, c + top * c_row + left, c_row, bottom - top, right - left, depth, add);
    });
}

}  // namespace mpipipe::cpu
