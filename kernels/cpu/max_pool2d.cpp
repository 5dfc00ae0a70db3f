// Of the usual windows those that lie on the plane are looked at in vectors, all others one by one. Backward clears a
// plane of dx and adds to it what its windows took, while it is in the cache.
#include "mpipipe/max_pool2d.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "mpipipe/threads.h"

namespace mpipipe::cpu {
namespace {

constexpr ptrdiff_t kPiece = 1 << 14;  // numbers of x that a piece of work reads, about

size_t planes_of_piece(const Pooling& sizes) {
    return static_cast<size_t>(std::max<ptrdiff_t>(1, kPiece / std::max<ptrdiff_t>(1, sizes[0] * sizes[1])));
}

// Of what was looked at: the first of the largest, or the last NaN.
struct Best {
    float value = -std::numeric_limits<float>::infinity();
    int32_t place = 0;

    void look_at(float other, int32_t at) {
        const bool taken = (other > value) | (other != other);
        value = taken ? other : value;
        place = taken ? at : place;
    }
};

// n windows of k x k places beside each other, `by` columns apart, of rows of w. Places are not bytes here: vectors
// would have as many of them as bytes, more than a row of a small image has.
template <int k, int by, typename T>
[[gnu::noinline]] void pool_row(const T* __restrict x, ptrdiff_t w, T* __restrict y, int32_t* __restrict which,
                                ptrdiff_t n) {
#pragma omp simd
    for (ptrdiff_t j = 0; j < n; ++j) {
        Best best;
#pragma GCC unroll 3
        for (int r = 0; r < k; ++r)
#pragma GCC unroll 3
            for (int c = 0; c < k; ++c) best.look_at(wide(x[r * w + j * by + c]), r * k + c);
        y[j] = narrow<T>(best.value);
        which[j] = best.place;
    }
}

// `pool_row` of these windows; null where there is none.
template <typename T>
decltype(&pool_row<2, 2, T>) row_of(ptrdiff_t kh, ptrdiff_t kw, ptrdiff_t by) {
    if (kh != kw) return nullptr;
    if (kw == 2 && by == 2) return pool_row<2, 2, T>;
    if (kw == 3 && by == 2) return pool_row<3, 2, T>;
    if (kw == 3 && by == 1) return pool_row<3, 1, T>;
    return nullptr;
}

// The window that begins at (top, left), and may begin before the plane or go beyond it.
template <typename T>
Best window(const T* plane, ptrdiff_t top, ptrdiff_t left, const Pooling& sizes) {
    const ptrdiff_t h = sizes[0], w = sizes[1], kh = sizes[4], kw = sizes[5];
    const ptrdiff_t row = std::max<ptrdiff_t>(0, -top), column = std::max<ptrdiff_t>(0, -left);
    Best best;
    best.place = static_cast<int32_t>(row * kw + column);
    for (ptrdiff_t r = row; r < std::min(kh, h - top); ++r)
        for (ptrdiff_t c = column; c < std::min(kw, w - left); ++c)
            best.look_at(wide(plane[(top + r) * w + left + c]), static_cast<int32_t>(r * kw + c));
    return best;
}

}  // namespace

template <typename T>
void max_pool2d(const T* x, T* y, uint8_t* which, size_t planes, Pooling sizes, int threads) {
    parallel_pieces(planes, planes_of_piece(sizes), threads, [=](size_t first, size_t last) {
        const auto [h, w, oh, ow, kh, kw, sh, sw, ph, pw] = sizes;
        const auto inside = row_of<T>(kh, kw, sw);
        const ptrdiff_t from = std::min(ow, (pw + sw - 1) / sw);  // columns of windows that lie on the plane
        const ptrdiff_t to = w + pw < kw ? from : std::max(from, std::min(ow, (w + pw - kw) / sw + 1));
        std::vector<int32_t> places(static_cast<size_t>(ow));
        for (ptrdiff_t i = static_cast<ptrdiff_t>(first) * oh; i < static_cast<ptrdiff_t>(last) * oh; ++i) {
            const T* const plane = x + i / oh * h * w;
            const ptrdiff_t top = i % oh * sh - ph;
            T* const row = y + i * ow;
            int32_t* const of_row = places.data();
            const auto one_by_one = [=, &sizes, left = -pw, by = sw](ptrdiff_t begin, ptrdiff_t end) {
                for (ptrdiff_t j = begin; j < end; ++j) {
                    const Best best = window(plane, top, j * by + left, sizes);
                    row[j] = narrow<T>(best.value);
                    of_row[j] = best.place;
                }
            };
            if (inside && top >= 0 && top + kh <= h) {
                one_by_one(0, from);
                inside(plane + top * w + from * sw - pw, w, row + from, of_row + from, to - from);
                one_by_one(to, ow);
            } else {
                one_by_one(0, ow);
            }
            if (!which) continue;
            for (ptrdiff_t j = 0; j < ow; ++j) which[i * ow + j] = static_cast<uint8_t>(of_row[j]);
        }
    });
}

template <typename T>
void max_pool2d_backward(const T* dy, const uint8_t* which, T* dx, size_t planes, Pooling sizes, int threads) {
    std::array<ptrdiff_t, 256> ahead{};  // from the first place of a window to each other one
    for (ptrdiff_t k = 0; k < sizes[4] * sizes[5]; ++k)
        ahead[static_cast<size_t>(k)] = k / sizes[5] * sizes[1] + k % sizes[5];
    parallel_pieces(planes, planes_of_piece(sizes), threads, [=, &ahead](size_t first, size_t last) {
        const auto [h, w, oh, ow, kh, kw, sh, sw, ph, pw] = sizes;
        for (ptrdiff_t p = static_cast<ptrdiff_t>(first); p < static_cast<ptrdiff_t>(last); ++p) {
            T* const plane = dx + p * h * w;
            std::fill_n(plane, h * w, T{});
            for (ptrdiff_t i = 0; i < oh; ++i) {
                const ptrdiff_t out = (p * oh + i) * ow, corner = (i * sh - ph) * w - pw;
                for (ptrdiff_t j = 0; j < ow; ++j) {
                    const ptrdiff_t at = corner + j * sw + ahead[which[out + j]];
                    if (static_cast<size_t>(at) >= static_cast<size_t>(h * w)) continue;  // no forward says so
                    plane[at] = narrow<T>(wide(plane[at]) + wide(dy[out + j]));
                }
            }
        }
    });
}

template decltype(max_pool2d<float>) max_pool2d<float>;
template decltype(max_pool2d<bf16>) max_pool2d<bf16>;
template decltype(max_pool2d_backward<float>) max_pool2d_backward<float>;
template decltype(max_pool2d_backward<bf16>) max_pool2d_backward<bf16>;

}  // namespace mpipipe::cpu
