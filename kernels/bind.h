// The thin door: numbers and addresses in, nothing out. No libtorch, so one build serves every torch version.
#pragma once

#include <pybind11/pybind11.h>

#include <array>

// A tensor's strides, which are a tuple of integers. That of pybind11/stl.h takes any sequence, and longer.
template <size_t n>
struct pybind11::detail::type_caster<std::array<ptrdiff_t, n>> {
    using Strides = std::array<ptrdiff_t, n>;
    PYBIND11_TYPE_CASTER(Strides, const_name("tuple[int, ...]"));

    bool load(handle given, bool) {
        if (!PyTuple_Check(given.ptr()) || PyTuple_GET_SIZE(given.ptr()) != n) return false;
        for (size_t i = 0; i < n; ++i) {
            value[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(given.ptr(), i));
            if (value[i] == -1 && PyErr_Occurred()) {
                PyErr_Clear();
                return false;
            }
        }
        return true;
    }
};

namespace mpipipe {

constexpr char kVersion[] = "15";  // of the functions of every module; mpipipe/ops asks for the same one

// How an argument comes from Python: a pointer as the integer tensor.data_ptr(), 0 for none; numbers as they are.
template <typename T>
struct FromPython {
    using type = T;
    static T of(type value) { return value; }
};
template <typename T>
struct FromPython<T*> {
    using type = uintptr_t;
    static T* of(type address) { return reinterpret_cast<T*>(address); }
};

// The kernels that a processor and a GPU have for the same two types: KERNEL(name) defines name_f32 and name_bf16.
#define MPIPIPE_KERNELS(KERNEL) \
    KERNEL(adamw) KERNEL(norms) \
    KERNEL(flash_attention) KERNEL(flash_attention_backward) \
    KERNEL(batch_norm) KERNEL(batch_norm_backward) \
    KERNEL(cross_entropy_forward) KERNEL(cross_entropy_backward) \
    KERNEL(swiglu) KERNEL(swiglu_backward)
// Likewise those whose second type is that of what is added: name_f32_bf16 as well.
#define MPIPIPE_NORMS(KERNEL) \
    KERNEL(layer_norm) KERNEL(layer_norm_backward) \
    KERNEL(rms_norm) KERNEL(rms_norm_backward)

// m.name(...) calls `kernel` without the interpreter's lock. The callers (mpipipe/ops) own the checks.
template <typename Result, typename... Arguments>
void def(pybind11::module_& m, const char* name, Result (*kernel)(Arguments...)) {
    m.def(
        name,
        [kernel](typename FromPython<Arguments>::type... given) { return kernel(FromPython<Arguments>::of(given)...); },
        pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace mpipipe
