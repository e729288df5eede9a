// What the steps of gsa and gla do with a memory: it is read and written once.
//
// A block has one sequence and memory head. Its threads cover a memory's rows in turns, each with `Pack`
// neighbouring columns; what they read out of it is added through shared memory, in the order of the rows.
#pragma once

#include "gsa/gsa.h"
#include "tile/grid.h"
#include "tile/launch.h"
#include "tile/pack.h"

namespace girih::kernels {

constexpr int kStepThreads = 128;

__device__ inline float element(const In<3>& x, int64_t n, int64_t head, int64_t i) {
  return load_any(x.data, x.dtype, n * x.stride[0] + head * x.stride[1] + i * x.stride[2]);
}

// out[c] = sum over rows r of read[r] * H[r, c], after H[r, c] <- row_decay * col_decay * H + row[r] col[c];
// by the whole block. `update` is false where H holds the token already. parts: kStepThreads * Pack floats.
template <int Pack_, class Decay>
__device__ inline void update_and_read(const Out<4>& state, int64_t n, int64_t head, int rows, int cols,
                                       bool update, const Decay& decay, const float* row, const float* col,
                                       const float* read, float* out, float* parts) {
  float* H = static_cast<float*>(state.data) + n * state.stride[0] + head * state.stride[1];
  const int packs = (cols + Pack_ - 1) / Pack_;
  for (int first = 0; first < packs; first += kStepThreads) {
    // Threads in `turns` rows of `wide` packs.
    const int wide = min(packs - first, kStepThreads), turns = kStepThreads / wide;
    const int turn = threadIdx.x / wide, c = (first + static_cast<int>(threadIdx.x) % wide) * Pack_;
    Pack<Pack_> sum = zeros<Pack_>();
    if (turn < turns) {
      // Four rows are under way at once: nothing says that a later row is not an earlier one's store.
      constexpr int kAtOnce = 4;
      for (int first_row = turn; first_row < rows; first_row += kAtOnce * turns) {
        Pack<Pack_> h[kAtOnce];
        const auto row_at = [&](int j) { return first_row + j * turns; };
        const auto at = [&](int j) { return H + row_at(j) * state.stride[2] + c * state.stride[3]; };
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (row_at(j) < rows) h[j] = load<Pack_>(at(j));
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int r = row_at(j);
          if (r >= rows) break;
          if (update) {
#pragma unroll
            for (int i = 0; i < Pack_; ++i) {
              h[j].at[i] = fmaf(h[j].at[i], decay(r, c + i), row[r] * col[c + i]);
            }
            store<Pack_>(at(j), h[j]);
          }
#pragma unroll
          for (int i = 0; i < Pack_; ++i) sum.at[i] = fmaf(read[r], h[j].at[i], sum.at[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Pack_; ++i) parts[threadIdx.x * Pack_ + i] = sum.at[i];
    __syncthreads();
    for (int i = threadIdx.x; i < wide * Pack_ && first * Pack_ + i < cols; i += kStepThreads) {
      float total = 0.f;
      for (int t = 0; t < turns; ++t) total += parts[t * wide * Pack_ + i];
      out[first * Pack_ + i] = total;
    }
    __syncthreads();
  }
}

// A block for every sequence and memory head, with so many floats of shared memory.
template <auto Kernel, class Problem>
cudaError_t launch_step(const Problem& p, int floats, cudaStream_t stream) {
  const int64_t blocks = p.sequences * p.heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  if (const cudaError_t error = allow_shared<Kernel>(limit); error != cudaSuccess) return error;
  Kernel<<<static_cast<unsigned>(blocks), kStepThreads, floats * sizeof(float), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
