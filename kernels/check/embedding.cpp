#include "mpipipe/embedding.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

// A few entries, so that most are looked up several times: the order of the additions is that of the rows.
template <typename T>
void embedding(Run& run, Draw& draw) {
    constexpr size_t entries = 5;
    for (int64_t padding : {-1, 2})
        for (size_t rows : {0, 1, 2, 33, 300})
            for (size_t width : {0, 1, 7, 16, 65, 1000}) {
                Buffer<int64_t> indices(rows);
                for (size_t r = 0; r < rows; ++r) indices[r] = static_cast<int64_t>(draw.below(entries));
                const Buffer<T> dy = draw.normal<T>(rows * width), start = draw.normal<T>(entries * width);
                Buffer<T> got(start), threaded(start), want(start);
                cpu::embedding_backward<T>(dy.data(), indices.data(), rows, width, padding, got.data(), 1);
                cpu::embedding_backward<T>(dy.data(), indices.data(), rows, width, padding, threaded.data(), many);
                reference::embedding_backward<T>(dy.data(), indices.data(), rows, width, padding, want.data(), 1);
                const std::string what = std::to_string(rows) + " x " + std::to_string(width);
                run.close(what, got, want, rounding<T>() * (1 + static_cast<double>(rows)));
                run.same("on threads, " + what, threaded, got);
            }
}

}  // namespace

CHECK(embedding) {
    embedding<float>(run, draw);
    embedding<bf16>(run, draw);
}
