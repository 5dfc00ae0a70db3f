// Products of two tiles in shared memory, of which one belongs to the block and the other passes by.
//
//     own       (8 kRows, kWidth)         kRows of them to each warp of the block
//     passing   (32, kWidth), a row padded by one float: the lanes of a warp read a column without a conflict
//     weights   (8 kRows, 32)             between own and passing rows; a warp reads only what it wrote
//
// Everything is float32; rows and columns beyond a tensor's end are 0.
#pragma once

#include "flash_attention_problem.cuh"
#include "launch.cuh"

namespace mpipipe::cuda {

constexpr unsigned kWarps = kThreads / kWarp;

template <int kRows_, int kWidth_>
struct Tiles {
    static constexpr int kRows = kRows_, kWidth = kWidth_;
    static constexpr int kOwn = kRows * kWarps;  // rows
    static constexpr int kPitch = kWidth + 1;
    static constexpr int kColumns = kWidth / kWarp;  // of an output row, for each lane

    using Own = float[kOwn * kWidth];
    using Passing = float[kWarp * kPitch];
    using Weights = float[kOwn * kWarp];

    // This thread's row r of its warp's, among the block's.
    static __device__ unsigned row(int r) { return threadIdx.x / kWarp * kRows + r; }

    template <typename T>
    static __device__ void load_own(Own& to, Rows<T> from, size_t first) {
        load<kWidth>(to, from, first, kOwn);
    }
    // All threads of the block wait for each other, before and after.
    template <typename T>
    static __device__ void load_passing(Passing& to, Rows<T> from, size_t first) {
        __syncthreads();
        load<kPitch>(to, from, first, kWarp);
        __syncthreads();
    }

    // out[r] = own row r of the warp times the passing row of the lane.
    static __device__ void products(const Own& own, const Passing& passing, float (&out)[kRows]) {
        const float *const mine = own + row(0) * kWidth, *const other = passing + threadIdx.x % kWarp * kPitch;
        for (float& x : out) x = 0;
        for (int e = 0; e < kWidth; ++e)
            for (int r = 0; r < kRows; ++r) out[r] += mine[r * kWidth + e] * other[e];
    }

    // The weights of the warp's rows, for add().
    static __device__ void set(Weights& weights, const float (&of)[kRows]) {
        __syncwarp();  // the last ones may still be read
        for (int r = 0; r < kRows; ++r) weights[row(r) * kWarp + threadIdx.x % kWarp] = of[r];
        __syncwarp();
    }

    // sum[r] += weights of row r times the passing rows; column c of the lane is element c * 32 + lane.
    static __device__ void add(const Weights& weights, const Passing& passing, float (&sum)[kRows][kColumns]) {
        for (unsigned j = 0; j < kWarp; ++j)
            for (int c = 0; c < kColumns; ++c) {
                const float x = passing[j * kPitch + c * kWarp + threadIdx.x % kWarp];
                for (int r = 0; r < kRows; ++r) sum[r][c] += weights[row(r) * kWarp + j] * x;
            }
    }

    // Rows first + row(r) of a tensor from sum[r]; what is beyond its end is not written.
    template <typename T>
    static __device__ void write(Rows<T> to, size_t first, const float (&sum)[kRows][kColumns]) {
        for (int r = 0; r < kRows; ++r)
            for (int c = 0; c < kColumns; ++c) {
                const size_t i = first + row(r), e = c * kWarp + threadIdx.x % kWarp;
                if (i < to.rows && e < to.width) to.at(i)[e] = narrow<T>(sum[r][c]);
            }
    }

  private:
    template <int kDistance, typename T>
    static __device__ void load(float* to, Rows<T> from, size_t first, int rows) {
        for (int at = threadIdx.x; at < rows * kWidth; at += kThreads) {
            const size_t i = first + at / kWidth, e = at % kWidth;
            to[at / kWidth * kDistance + e] = i < from.rows && e < from.width ? wide(from.at(i)[e]) : 0.0f;
        }
    }
};

}  // namespace mpipipe::cuda
