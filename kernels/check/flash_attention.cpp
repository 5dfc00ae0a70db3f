#include "mpipipe/flash_attention.h"

#include "check.h"

using namespace mpipipe;
using namespace mpipipe::check;

namespace {

struct Shape {
    size_t batch, heads, key_heads, queries, keys, width;
};

// All that both directions take; tensors lie as (batch, token, head, width), and q, k, v side by side in a token.
template <typename T>
struct Case {
    Shape s;
    bool causal;
    Buffer<T> q, k, v, d_o;
    Buffer<int64_t> lengths;  // empty: none
    Buffer<bool> mask;

    Case(Shape shape, bool is_causal, bool with_lengths, bool with_mask, Draw& draw)
        : s(shape), causal(is_causal), q(draw.normal<T>(queries())), k(draw.normal<T>(keys())),
          v(draw.normal<T>(keys())), d_o(draw.normal<T>(queries())), lengths(with_lengths ? s.batch : 0),
          mask(with_mask ? s.batch * s.keys : 0) {
        // the first sample sees nothing
        for (size_t b = 0; b < lengths.size(); ++b)
            lengths[b] = b ? static_cast<int64_t>(draw.below(s.keys + 1)) : 0;
        for (size_t i = 0; i < mask.size(); ++i) mask[i] = i >= s.keys && draw.below(2);
    }

    size_t queries() const { return s.batch * s.queries * s.heads * s.width; }
    size_t keys() const { return s.batch * s.keys * s.key_heads * s.width; }
    Strides of(size_t tokens, size_t heads) const {
        const auto width = static_cast<ptrdiff_t>(s.width), token = width * static_cast<ptrdiff_t>(heads);
        return {token * static_cast<ptrdiff_t>(tokens), width, token, 1};
    }
    float scale() const { return 1 / std::sqrt(static_cast<float>(s.width)); }
    const int64_t* lengths_or_null() const { return lengths.size() ? lengths.data() : nullptr; }
    const bool* mask_or_null() const { return mask.size() ? mask.data() : nullptr; }
};

template <typename T>
struct Forward {
    Buffer<T> o;
    Buffer<float> lse;

    template <typename Kernel>
    Forward(Kernel kernel, const Case<T>& c, int threads) : o(c.queries()), lse(c.s.batch * c.s.heads * c.s.queries) {
        const Strides q = c.of(c.s.queries, c.s.heads), k = c.of(c.s.keys, c.s.key_heads);
        kernel(c.q.data(), c.k.data(), c.v.data(), q, k, k, c.s.batch, c.s.heads, c.s.key_heads, c.s.queries,
               c.s.keys, c.s.width, c.causal, c.scale(), c.lengths_or_null(), c.mask_or_null(), o.data(), q,
               lse.data(), threads);
    }
};

template <typename T>
struct Backward {
    Buffer<T> dq, dk, dv;

    template <typename Kernel>
    Backward(Kernel kernel, const Case<T>& c, const Forward<T>& f, int threads)
        : dq(c.queries()), dk(c.keys()), dv(c.keys()) {
        const Strides q = c.of(c.s.queries, c.s.heads), k = c.of(c.s.keys, c.s.key_heads);
        kernel(c.q.data(), c.k.data(), c.v.data(), q, k, k, c.s.batch, c.s.heads, c.s.key_heads, c.s.queries,
               c.s.keys, c.s.width, c.causal, c.scale(), c.lengths_or_null(), c.mask_or_null(), f.o.data(), q,
               f.lse.data(), c.d_o.data(), q, dq.data(), q, dk.data(), k, dv.data(), k, threads);
    }
};

template <typename T>
void compare(Run& run, const Case<T>& c) {
    const Shape s = c.s;
    const double bound = std::is_same_v<T, float> ? 1e-5 : 4 * rounding<bf16>();
    const std::string what = std::to_string(s.queries) + " x " + std::to_string(s.keys) + " x " +
                             std::to_string(s.width) + (c.causal ? ", causal" : "") +
                             (c.lengths.size() ? ", lengths" : "") + (c.mask.size() ? ", mask" : "");
    const Forward<T> got(cpu::flash_attention<T>, c, 1), threaded(cpu::flash_attention<T>, c, many),
        want(reference::flash_attention<T>, c, 1);
    run.close("o, " + what, got.o, want.o, bound);
    run.close("lse, " + what, got.lse, want.lse, bound, 1);
    run.same("o on threads, " + what, threaded.o, got.o);
    const Backward<T> got_back(cpu::flash_attention_backward<T>, c, want, 1),
        threaded_back(cpu::flash_attention_backward<T>, c, want, many),
        want_back(reference::flash_attention_backward<T>, c, want, 1);
    run.close("dq, " + what, got_back.dq, want_back.dq, 2 * bound, 0.1);
    run.close("dk, " + what, got_back.dk, want_back.dk, 2 * bound, 0.1);
    run.close("dv, " + what, got_back.dv, want_back.dv, 2 * bound, 0.1);
    run.same("dq on threads, " + what, threaded_back.dq, got_back.dq);
    run.same("dk on threads, " + what, threaded_back.dk, got_back.dk);
    run.same("dv on threads, " + what, threaded_back.dv, got_back.dv);
}

template <typename T>
void flash_attention(Run& run, Draw& draw) {
    const Shape shapes[] = {
        {1, 1, 1, 1, 1, 1},   {1, 2, 2, 3, 5, 7},     {2, 4, 2, 17, 17, 32}, {2, 2, 1, 65, 33, 64},
        {1, 2, 2, 33, 130, 80}, {1, 1, 1, 64, 64, 96},  {2, 2, 2, 9, 70, 128}, {1, 3, 1, 31, 16, 40},
        {1, 2, 1, 67, 71, 97}, {0, 2, 2, 4, 4, 32},  {2, 2, 2, 0, 4, 32},    {2, 2, 2, 4, 0, 32},
    };
    for (const Shape& s : shapes)
        for (bool causal : {false, true}) {
            compare(run, Case<T>(s, causal, false, false, draw));
            compare(run, Case<T>(s, causal, true, false, draw));
            compare(run, Case<T>(s, causal, false, true, draw));
        }
}

}  // namespace

CHECK(flash_attention) {
    flash_attention<float>(run, draw);
    flash_attention<bf16>(run, draw);
}
