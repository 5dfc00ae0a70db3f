// The thin door: addresses in, nothing out. No libtorch, so one build serves every torch version.
// The callers (mpipipe/ops) own the checks: contiguous, right dtype, n elements on both sides.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "mpipipe/evict.h"
#include "mpipipe/philox.h"
#include "mpipipe/reuse.h"

namespace py = pybind11;
using namespace mpipipe;

namespace {

using Address = uintptr_t;  // tensor.data_ptr()

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

template <typename T, typename Scale>
void dropout(uint64_t key, uint32_t step, uint32_t micro, uint64_t threshold, Scale scale, Address x, Address y,
             size_t n) {
    cpu::dropout<T, Scale>({key, step, micro}, threshold, scale, at<const T>(x), at<T>(y), n);
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    m.doc() = "Compiled kernels of mpipipe; the contract is kernels/include.";
    m.attr("version") = "3";  // of the functions below; mpipipe/ops asks for the same one
    m.def("words", [](uint64_t key, uint32_t step, uint32_t micro, uint64_t start, Address out, size_t n) {
        cpu::words({key, step, micro}, start, n, at<uint32_t>(out));
    }, no_gil);
    m.def("reference_words", [](uint64_t key, uint32_t step, uint32_t micro, uint64_t start, Address out, size_t n) {
        reference::words({key, step, micro}, start, n, at<uint32_t>(out));
    }, no_gil);
    m.def("reference_cipher", [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
        const uint32_t counter[4] = {c0, c1, c2, c3}, key[2] = {k0, k1};
        uint32_t out[4];
        reference::philox4x32(counter, key, out);
        return py::make_tuple(out[0], out[1], out[2], out[3]);
    });
    m.def("evict", [](Address p, size_t nbytes) { return cpu::evict(at<const void>(p), nbytes); }, no_gil);
    m.def("reuse_freed_blocks", [](const std::vector<std::string>& libraries, size_t largest) {
        std::vector<const char*> prefixes;
        for (const auto& library : libraries) prefixes.push_back(library.c_str());
        return cpu::reuse_freed_blocks(prefixes.data(), prefixes.size(), largest);
    });
    m.def("dropout_f32", &dropout<float, float>, no_gil);
    m.def("dropout_f64", &dropout<double, double>, no_gil);
    m.def("dropout_bf16", &dropout<bf16, float>, no_gil);
}
