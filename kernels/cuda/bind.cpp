// mpipipe._kernels_cuda: the functions of mpipipe._kernels_<set> that a GPU has, under their names. In place of the
// number of threads they take two integers: the stream, and the number of the device that it and the tensors are on.
#include <cuda_runtime.h>

#include "../bind.h"
#include "check.h"
#include "mpipipe/accumulate.h"
#include "mpipipe/adamw.h"
#include "mpipipe/batch_norm.h"
#include "mpipipe/bias_gelu.h"
#include "mpipipe/cross_entropy.h"
#include "mpipipe/embedding.h"
#include "mpipipe/flash_attention.h"
#include "mpipipe/layer_norm.h"
#include "mpipipe/norms.h"
#include "mpipipe/philox.h"
#include "mpipipe/swiglu.h"

namespace py = pybind11;
using namespace mpipipe;

namespace {

// Of the calling thread, for as long as the object is there.
class CurrentDevice {
  public:
    explicit CurrentDevice(int device) {
        cuda::check(cudaGetDevice(&before_), "which GPU is used");
        cuda::check(cudaSetDevice(device), "choice of a GPU");
    }
    CurrentDevice(const CurrentDevice&) = delete;
    ~CurrentDevice() { cudaSetDevice(before_); }

  private:
    int before_ = 0;
};

template <typename Result, typename... Arguments>
void def_on_device(py::module_& m, const char* name, Result (*kernel)(Arguments...)) {
    m.def(
        name,
        [kernel](typename FromPython<Arguments>::type... given, int device) {
            const CurrentDevice current(device);
            return kernel(FromPython<Arguments>::of(given)...);
        },
        py::call_guard<py::gil_scoped_release>());
}

template <typename T, typename Scale>
void dropout(uint64_t key, uint32_t step, uint32_t micro, uint64_t threshold, Scale scale, const T* x, T* y,
             size_t n, CudaStream queue) {
    cuda::dropout<T, Scale>({key, step, micro}, threshold, scale, x, y, n, queue);
}

}  // namespace

#define DEF(kernel) \
    def_on_device(m, #kernel "_f32", &cuda::kernel<float>); \
    def_on_device(m, #kernel "_bf16", &cuda::kernel<bf16>);
#define DEF_NORM(kernel) \
    def_on_device(m, #kernel "_f32", &cuda::kernel<float, float>); \
    def_on_device(m, #kernel "_bf16", &cuda::kernel<bf16, bf16>); \
    def_on_device(m, #kernel "_f32_bf16", &cuda::kernel<float, bf16>);

PYBIND11_MODULE(_kernels_cuda, m) {
    m.doc() = "Kernels of mpipipe for GPUs; the contract is kernels/include.";
    m.attr("version") = kVersion;

    def_on_device(m, "dropout_f32", &dropout<float, float>);
    def_on_device(m, "dropout_f64", &dropout<double, double>);
    def_on_device(m, "dropout_bf16", &dropout<bf16, float>);
    MPIPIPE_KERNELS(DEF)
    MPIPIPE_NORMS(DEF_NORM)
    def_on_device(m, "accumulate_bf16", &cuda::accumulate);
    def_on_device(m, "cross_entropy_loss", &cuda::cross_entropy_loss);
    def_on_device(m, "embedding_backward_f32", &cuda::embedding_backward);
    def_on_device(m, "bias_gelu_f32", &cuda::bias_gelu<float, float>);
    def_on_device(m, "bias_gelu_bf16", &cuda::bias_gelu<bf16, bf16>);
    def_on_device(m, "bias_gelu_bf16_f32", &cuda::bias_gelu<bf16, float>);
    def_on_device(m, "bias_gelu_backward_f32", &cuda::bias_gelu_backward<float, float>);
    def_on_device(m, "bias_gelu_backward_bf16", &cuda::bias_gelu_backward<bf16, bf16>);
    def_on_device(m, "bias_gelu_backward_bf16_f32", &cuda::bias_gelu_backward<bf16, float>);
}
