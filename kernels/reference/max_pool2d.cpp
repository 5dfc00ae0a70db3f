// Place by place, as the header says it.
#include "mpipipe/max_pool2d.h"

#include <cmath>

namespace mpipipe::reference {
namespace {

// visit(plane * places of y + place of y, place in the window, place of x) for all that lies on a plane.
template <typename Visit>
void each(size_t planes, Pooling sizes, Visit visit) {
    const auto [h, w, oh, ow, kh, kw, sh, sw, ph, pw] = sizes;
    for (ptrdiff_t plane = 0; plane < static_cast<ptrdiff_t>(planes); ++plane)
        for (ptrdiff_t i = 0; i < oh; ++i)
            for (ptrdiff_t j = 0; j < ow; ++j)
                for (ptrdiff_t k = 0; k < kh * kw; ++k) {
                    const ptrdiff_t row = i * sh - ph + k / kw, column = j * sw - pw + k % kw;
                    if (row < 0 || row >= h || column < 0 || column >= w) continue;
                    visit((plane * oh + i) * ow + j, k, (plane * h + row) * w + column);
                }
}

}  // namespace

template <typename T>
void max_pool2d(const T* x, T* y, uint8_t* which, size_t planes, Pooling sizes, int) {
    ptrdiff_t last = -1;
    each(planes, sizes, [&](ptrdiff_t out, ptrdiff_t k, ptrdiff_t in) {
        const double value = wide(x[in]);
        if (out != last || value > wide(y[out]) || std::isnan(value)) {
            y[out] = x[in];
            if (which) which[out] = static_cast<uint8_t>(k);
        }
        last = out;
    });
}

template <typename T>
void max_pool2d_backward(const T* dy, const uint8_t* which, T* dx, size_t planes, Pooling sizes, int) {
    for (ptrdiff_t i = 0; i < static_cast<ptrdiff_t>(planes) * sizes[0] * sizes[1]; ++i) dx[i] = narrow<T>(0.0f);
    each(planes, sizes, [&](ptrdiff_t out, ptrdiff_t k, ptrdiff_t in) {
        const double sum = double{wide(dx[in])} + wide(dy[out]);
        if (which[out] == k) dx[in] = narrow<T>(static_cast<float>(sum));
    });
}

template decltype(max_pool2d<float>) max_pool2d<float>;
template decltype(max_pool2d<bf16>) max_pool2d<bf16>;
template decltype(max_pool2d_backward<float>) max_pool2d_backward<float>;
template decltype(max_pool2d_backward<bf16>) max_pool2d_backward<bf16>;

}  // namespace mpipipe::reference
