// Parts of the kernels of key rows: stores of rows, and the gradient of the gates.
#pragma once

#include "gsa/block.cuh"

namespace girih::kernels {

// store_rows for an array of T or fp32: columns col.. of `cols`.
template <typename T, int Eights = 8, int N>
__device__ inline void store_rows_as(const Accumulator<N>& sums, const SharedTile<T, kChunk, kSlab>& staging,
                                     int warp, const OutputTensor<4>& to, const TokenRange& range, int head,
                                     int col, int cols, int staging_col = 0) {
  if (to.dtype != DType::f32) {
    store_rows<T, Eights>(sums, staging, warp, to, range, head, col, cols, staging_col);
    return;
  }
  float* rows = chunk_rows<float>(to, range, head) + col;
  for_each_register_pair<Eights>([&](int n, int i) {
    const int row = kWarpRows * warp + lane_row() + 8 * i, c = 8 * n + lane_col();
    if (row < range.length && c < cols - col) {
      *reinterpret_cast<float2*>(rows + row * to.stride[1] + c) = {sums.at[n][2 * i], sums.at[n][2 * i + 1]};
    }
  });
}

// Sum over rows of state * (gradient of the state), for each of M columns. A thread has 8 neighbouring
// columns of every kRowsPerIteration-th row.
template <int Threads, int M>
struct StateDot {
  static constexpr int kPacks = M / 8;
  static constexpr int kRowsPerIteration = Threads / kPacks;
  float sum[8] = {};

  // The thread's packs in one half of up to 64 rows of the state and of its gradient. Row indices are
  // clamped, so that all loads are issued before the first is waited for; add() ignores rows past the end.
  struct Rows {
    uint4 state[kSlab / 2 / kRowsPerIteration], gradient[kSlab / 2 / kRowsPerIteration];
    int first, count;
  };
  template <typename T>
  __device__ static Rows load(const T* states, const T* gradients, int rows, int slots, int thread,
                              int half) {
    Rows loaded;
    loaded.first = kSlab / 2 * half + thread / kPacks, loaded.count = rows;
    const int pack = min(thread % kPacks * 8, slots - 8);
#pragma unroll
    for (int i = 0; i < kSlab / 2 / kRowsPerIteration; ++i) {
      const int64_t at =
          static_cast<int64_t>(min(loaded.first + i * kRowsPerIteration, rows - 1)) * slots + pack;
      loaded.state[i] = *reinterpret_cast<const uint4*>(states + at);
      loaded.gradient[i] = *reinterpret_cast<const uint4*>(gradients + at);
    }
    return loaded;
  }
  template <typename T>
  __device__ void add(const Rows& rows) {
#pragma unroll
    for (int i = 0; i < kSlab / 2 / kRowsPerIteration; ++i) {
      const bool exists = rows.first + i * kRowsPerIteration < rows.count;
      const uint4 &state_pack = rows.state[i], &gradient_pack = rows.gradient[i];
      const uint32_t s[4] = {state_pack.x, state_pack.y, state_pack.z, state_pack.w},
                     g[4] = {gradient_pack.x, gradient_pack.y, gradient_pack.z, gradient_pack.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 a = unpack_pair<T>(exists ? s[j] : 0u), b = unpack_pair<T>(g[j]);
        sum[2 * j] = fmaf(a.x, b.x, sum[2 * j]);
        sum[2 * j + 1] = fmaf(a.y, b.y, sum[2 * j + 1]);
      }
    }
  }

  // Adds the product at the start of a sequence, where the state and its gradient are fp32 arrays. Without an
  // initial state the product is zero.
  __device__ void add_start(const InputTensor<4>& state, const InputTensor<4>& gradient,
                            const TokenRange& range, int head, int rows, int slots, int thread) {
    if (state.data == nullptr) return;
    const auto at = [&](const InputTensor<4>& x, int row, int col) {
      return static_cast<const float*>(x.data)[offset_of(x, range.sequence.index, head, row, col)];
    };
    for (int row = thread / kPacks; row < rows; row += kRowsPerIteration) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int col = thread % kPacks * 8 + j;
        if (col < slots) sum[j] += at(state, row, col) * at(gradient, row, col);
      }
    }
  }

  // Sums over the lanes with the same columns and writes the warp's sums [M].
  __device__ void store(float* to) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int other = kPacks; other < 32; other *= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], other);
      if (lane() < kPacks) to[lane() * 8 + j] = sum[j];
    }
  }
};

// dg_t = state_dot - sum_{j<t} c_j + weight_term(t, m), with c = w - s ds (dkv.cuh) and state_dot summed over
// `DotWarps` warps. A thread has a column and a range of rows, and first sums the rows before its range.
// Called by all threads after a barrier.
template <int Threads, int DotWarps, int M, class WeightTerm>
__device__ inline void store_gate_gradients(const SharedTile<float, kChunk, M>& c, const float* state_dot,
                                            const OutputTensor<4>& to, const TokenRange& range, int head,
                                            int slots, const WeightTerm& weight_term) {
  constexpr int kShare = kChunk * M / Threads;
  const int m = threadIdx.x % M, from = static_cast<int>(threadIdx.x) / M * kShare;
  float* dg = chunk_rows<float>(to, range, head) + from * to.stride[1] + m;
  const int rows = m < slots ? range.length - from : 0;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < DotWarps; ++i) sum += state_dot[i * M + m];
#pragma unroll 16
  for (int row = 0; row < from; ++row) sum -= c.at(row, m);
#pragma unroll 16
  for (int row = 0; row < kShare; ++row) {
    if (row < rows) *dg = sum + weight_term(from + row, m);
    sum -= c.at(from + row, m);
    dg += to.stride[1];
  }
}

}  // namespace girih::kernels
