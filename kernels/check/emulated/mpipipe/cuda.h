// In place of include/mpipipe/cuda.h where the processor stands for a GPU: a stream is a number that says nothing, so
// that a CHECK calls the kernels of a GPU as it calls those of the processor.
#pragma once

namespace mpipipe {

using CudaStream = int;

}  // namespace mpipipe

#define MPIPIPE_ANYWHERE
