#include "bind.h"

#include <pybind11/stl.h>

#include "mpipipe/accumulate.h"
#include "mpipipe/adamw.h"
#include "mpipipe/batch_norm.h"
#include "mpipipe/bias_gelu.h"
#include "mpipipe/cross_entropy.h"
#include "mpipipe/embedding.h"
#include "mpipipe/evict.h"
#include "mpipipe/flash_attention.h"
#include "mpipipe/gemm.h"
#include "mpipipe/layer_norm.h"
#include "mpipipe/math.h"
#include "mpipipe/max_pool2d.h"
#include "mpipipe/norms.h"
#include "mpipipe/philox.h"
#include "mpipipe/reuse.h"
#include "mpipipe/swiglu.h"

namespace py = pybind11;
using namespace mpipipe;

namespace {

template <typename T, typename Scale>
void dropout(uint64_t key, uint32_t step, uint32_t micro, uint64_t threshold, Scale scale, const T* x, T* y,
             size_t n, int threads) {
    cpu::dropout<T, Scale>({key, step, micro}, threshold, scale, x, y, n, threads);
}

void words(uint64_t key, uint32_t step, uint32_t micro, uint64_t start, uint32_t* out, size_t n, int threads) {
    cpu::words({key, step, micro}, start, n, out, threads);
}

void reference_words(uint64_t key, uint32_t step, uint32_t micro, uint64_t start, uint32_t* out, size_t n) {
    reference::words({key, step, micro}, start, n, out, 1);
}

template <float function(float)>
void each(const float* x, float* y, size_t n) {
    for (size_t i = 0; i < n; ++i) y[i] = function(x[i]);
}

}  // namespace

#define DEF(kernel) \
    def(m, #kernel "_f32", &cpu::kernel<float>); \
    def(m, #kernel "_bf16", &cpu::kernel<bf16>);
#define DEF_NORM(kernel) \
    def(m, #kernel "_f32", &cpu::kernel<float, float>); \
    def(m, #kernel "_bf16", &cpu::kernel<bf16, bf16>); \
    def(m, #kernel "_f32_bf16", &cpu::kernel<float, bf16>);

PYBIND11_MODULE(MPIPIPE_MODULE, m) {
    m.doc() = "Compiled kernels of mpipipe; the contract is kernels/include.";
    m.attr("version") = kVersion;
    m.attr("instruction_set") = MPIPIPE_SET;

    def(m, "words", &words);
    def(m, "reference_words", &reference_words);
    m.def("reference_cipher", [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
        const uint32_t counter[4] = {c0, c1, c2, c3}, key[2] = {k0, k1};
        uint32_t out[4];
        reference::philox4x32(counter, key, out);
        return py::make_tuple(out[0], out[1], out[2], out[3]);
    });
    def(m, "dropout_f32", &dropout<float, float>);
    def(m, "dropout_f64", &dropout<double, double>);
    def(m, "dropout_bf16", &dropout<bf16, float>);

    MPIPIPE_KERNELS(DEF)
    MPIPIPE_NORMS(DEF_NORM)
    def(m, "accumulate_bf16", &cpu::accumulate);
    def(m, "cross_entropy_loss", &cpu::cross_entropy_loss);
    def(m, "embedding_backward_f32", &cpu::embedding_backward);
    def(m, "gemm_f32", &cpu::gemm);
    DEF(max_pool2d)
    DEF(max_pool2d_backward)
    def(m, "reference_cross_entropy_forward_f32", &reference::cross_entropy_forward<float>);
    def(m, "reference_cross_entropy_forward_bf16", &reference::cross_entropy_forward<bf16>);
    def(m, "reference_cross_entropy_backward_f32", &reference::cross_entropy_backward<float>);
    def(m, "reference_cross_entropy_backward_bf16", &reference::cross_entropy_backward<bf16>);
    def(m, "bias_gelu_f32", &cpu::bias_gelu<float, float>);
    def(m, "bias_gelu_bf16", &cpu::bias_gelu<bf16, bf16>);
    def(m, "bias_gelu_bf16_f32", &cpu::bias_gelu<bf16, float>);
    def(m, "bias_gelu_backward_f32", &cpu::bias_gelu_backward<float, float>);
    def(m, "bias_gelu_backward_bf16", &cpu::bias_gelu_backward<bf16, bf16>);
    def(m, "bias_gelu_backward_bf16_f32", &cpu::bias_gelu_backward<bf16, float>);
    def(m, "math_exp", &each<exp_>);  // for the tests of math.h
    def(m, "math_sigmoid", &each<sigmoid>);
    def(m, "math_normal_cdf", &each<normal_cdf<float>>);

    def(m, "evict", &cpu::evict);
    m.def("reuse_freed_blocks", [](const std::vector<std::string>& libraries, size_t largest) {
        std::vector<const char*> prefixes;
        for (const auto& library : libraries) prefixes.push_back(library.c_str());
        return cpu::reuse_freed_blocks(prefixes.data(), prefixes.size(), largest);
    });
}
