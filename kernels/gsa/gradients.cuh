// Parts of the kernels of key rows: stores of rows, and the gradient of the gates.
#pragma once

#include "gsa/block.cuh"

namespace girih::kernels {

// store_rows for an array of T or fp32: columns col.. of `cols`.
template <typename T, int Eights = 8, int N>
__device__ inline void store_rows_of(const Sums<N>& sums, const SharedTile<T, kChunk, kSlab>& stage, int warp,
                                     const Out<4>& to, const Piece& piece, int head, int col, int cols,
                                     int at = 0) {
  if (to.dtype != DType::f32) {
    store_rows<T, Eights>(sums, stage, warp, to, piece, head, col, cols, at);
    return;
  }
  float* rows = chunk_rows<float>(to, piece, head) + col;
  each_pair<Eights>([&](int n, int i) {
    const int row = kRows * warp + lane_row() + 8 * i, c = 8 * n + lane_col();
    if (row < piece.length && c < cols - col) {
      *reinterpret_cast<float2*>(rows + row * to.stride[1] + c) = {sums.at[n][2 * i], sums.at[n][2 * i + 1]};
    }
  });
}

// Sum over rows of state * (gradient of the state), for each of M columns. A thread has 8 neighbouring
// columns of every kRowsAtOnce-th row.
template <int Threads, int M>
struct EdgeSum {
  static constexpr int kPacks = M / 8;
  static constexpr int kRowsAtOnce = Threads / kPacks;
  float sum[8] = {};

  // Half of up to 64 rows of the state and of its gradient. Row indices are clamped, so that all loads are
  // issued before the first is waited for; add() ignores rows past the end.
  struct Rows {
    uint4 state[kSlab / 2 / kRowsAtOnce], gradient[kSlab / 2 / kRowsAtOnce];
    int first, count;
  };
  template <typename T>
  __device__ static Rows load(const T* states, const T* gradients, int rows, int slots, int thread,
                              int half) {
    Rows loaded;
    loaded.first = kSlab / 2 * half + thread / kPacks, loaded.count = rows;
    const int pack = min(thread % kPacks * 8, slots - 8);
#pragma unroll
    for (int i = 0; i < kSlab / 2 / kRowsAtOnce; ++i) {
      const int64_t at = static_cast<int64_t>(min(loaded.first + i * kRowsAtOnce, rows - 1)) * slots + pack;
      loaded.state[i] = *reinterpret_cast<const uint4*>(states + at);
      loaded.gradient[i] = *reinterpret_cast<const uint4*>(gradients + at);
    }
    return loaded;
  }
  template <typename T>
  __device__ void add(const Rows& rows) {
#pragma unroll
    for (int i = 0; i < kSlab / 2 / kRowsAtOnce; ++i) {
      const bool counts = rows.first + i * kRowsAtOnce < rows.count;
      const uint4 &of_state = rows.state[i], &of_gradient = rows.gradient[i];
      const uint32_t s[4] = {of_state.x, of_state.y, of_state.z, of_state.w},
                     g[4] = {of_gradient.x, of_gradient.y, of_gradient.z, of_gradient.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 a = unpaired<T>(counts ? s[j] : 0u), b = unpaired<T>(g[j]);
        sum[2 * j] = fmaf(a.x, b.x, sum[2 * j]);
        sum[2 * j + 1] = fmaf(a.y, b.y, sum[2 * j + 1]);
      }
    }
  }

  // Adds the product at the start of a sequence, where the state and its gradient are fp32 arrays. Without an
  // initial state the product is zero.
  __device__ void add_start(const In<4>& state, const In<4>& gradient, const Piece& piece, int head, int rows,
                            int slots, int thread) {
    if (state.data == nullptr) return;
    const auto at = [&](const In<4>& x, int row, int col) {
      return static_cast<const float*>(x.data)[offset_of(x, piece.sequence.index, head, row, col)];
    };
    for (int row = thread / kPacks; row < rows; row += kRowsAtOnce) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int col = thread % kPacks * 8 + j;
        if (col < slots) sum[j] += at(state, row, col) * at(gradient, row, col);
      }
    }
  }

  // Sums over the lanes with the same columns and writes the warp's sums [M].
  __device__ void put(float* to) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int other = kPacks; other < 32; other *= 2) sum[j] += __shfl_xor_sync(~0u, sum[j], other);
      if (lane() < kPacks) to[lane() * 8 + j] = sum[j];
    }
  }
};

// dg_t = edge - sum_{j<t} c_j + beyond(t, m), edge the sum over `Edges` warps. A thread has a column and a
// part of the rows and first sums the rows before them. Called by all threads after a barrier.
template <int Threads, int Edges, int M, class Beyond>
__device__ inline void put_gate_gradients(const SharedTile<float, kChunk, M>& c, const float* edge,
                                          const Out<4>& to, const Piece& piece, int head, int slots,
                                          const Beyond& beyond) {
  constexpr int kShare = kChunk * M / Threads;
  const int m = threadIdx.x % M, from = static_cast<int>(threadIdx.x) / M * kShare;
  float* dg = chunk_rows<float>(to, piece, head) + from * to.stride[1] + m;
  const int rows = m < slots ? piece.length - from : 0;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < Edges; ++i) sum += edge[i * M + m];
#pragma unroll 16
  for (int row = 0; row < from; ++row) sum -= c.at(row, m);
#pragma unroll 16
  for (int row = 0; row < kShare; ++row) {
    if (row < rows) *dg = sum + beyond(from + row, m);
    sum -= c.at(from + row, m);
    dg += to.stride[1];
  }
}

}  // namespace girih::kernels
