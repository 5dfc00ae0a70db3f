// What the headers say of GPUs, for compilers that know of them and for those that do not.
#pragma once

struct CUstream_st;

namespace mpipipe {

using CudaStream = CUstream_st*;  // a cudaStream_t; null: the default stream of the current device

}  // namespace mpipipe

#ifdef __CUDACC__
#define MPIPIPE_ANYWHERE __host__ __device__
#else
#define MPIPIPE_ANYWHERE
#endif
