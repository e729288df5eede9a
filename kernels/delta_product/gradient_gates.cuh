// The gradients of the gates.
#pragma once

#include "delta_product/gradient_rows.cuh"

namespace girih::kernels::delta_product {

// The thread's share of <S, dS> of a slab. The states are rounded; the initial and the final state of a
// sequence are fp32.
template <typename T, int D, bool OneSlab>
class StateDot {
  using Sizes = GradientSizes<D>;
  static constexpr int kPacks = Sizes::kSlab * D / 8 / Sizes::kThreads;
  uint4 ds_packs_[Sizes::kHasBothStates ? 1 : kPacks];  // dS while its shared memory holds S

  __device__ static int row(int pack) { return (pack * Sizes::kThreads + threadIdx.x) / (D / 8); }
  __device__ static int col(int pack) { return (pack * Sizes::kThreads + threadIdx.x) % (D / 8) * 8; }

 public:
  __device__ void load(const DeltaGradients& p, const ChunkInfo& chunk_info, int v) {
    if (Sizes::kHasBothStates) return;
    const T* const from = chunk_info.state<T>(p.gradients, p.shape, v);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const bool valid = v + row(i) < p.shape.V && col(i) < p.shape.D;
      ds_packs_[i] =
          valid ? *reinterpret_cast<const uint4*>(from + row(i) * p.shape.D + col(i)) : uint4{0u, 0u, 0u, 0u};
    }
  }

  __device__ float sum(const DeltaGradients& p, const ChunkInfo& chunk_info,
                       const GradientTiles<T, D, OneSlab>& tile, int v) const {
    const bool is_initial = chunk_info.range.index == 0 && p.initial.data != nullptr,
               is_final = chunk_info.range.start + chunk_info.range.length == chunk_info.range.sequence.end &&
                          p.end.data != nullptr;
    float sum = 0.f;
    if (is_initial || is_final) {
      const auto load_pair = [&](const InputTensor<4>& state, const void* rounded, bool is_fp32, int d,
                                 int col) {
        if (!is_fp32) {
          return unpack_pair<T>(*reinterpret_cast<const uint32_t*>(chunk_info.state<T>(rounded, p.shape, v) +
                                                                   col * p.shape.D + d));
        }
        const float* const at =
            static_cast<const float*>(state.data) +
            offset_of(state, chunk_info.range.sequence.index, chunk_info.head, d, v + col);
        return make_float2(at[0], at[state.stride[2]]);
      };
      const int cols = min(Sizes::kSlab, p.shape.V - v);
#pragma unroll 1
      for (int i = threadIdx.x; i < cols * p.shape.D / 2; i += Sizes::kThreads) {
        const int d = i / cols * 2, col = i % cols;
        const float2 s = load_pair(p.initial, p.states, is_initial, d, col),
                     ds = load_pair(p.end, p.gradients, is_final, d, col);
        sum = fmaf(s.x, ds.x, fmaf(s.y, ds.y, sum));
      }
      return sum;
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int tile_row = row(i) % 64;
      const uint4 s = *reinterpret_cast<const uint4*>(&tile.s(row(i)).at(tile_row, col(i)));
      const uint4 ds = Sizes::kHasBothStates
                           ? *reinterpret_cast<const uint4*>(&tile.ds(row(i)).at(tile_row, col(i)))
                           : ds_packs_[Sizes::kHasBothStates ? 0 : i];
      const uint32_t x[4] = {s.x, s.y, s.z, s.w}, y[4] = {ds.x, ds.y, ds.z, ds.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 s_pair = unpack_pair<T>(x[j]), ds_pair = unpack_pair<T>(y[j]);
        sum = fmaf(s_pair.x, ds_pair.x, fmaf(s_pair.y, ds_pair.y, sum));
      }
    }
    return sum;
  }
};

// dg_t = sum_{s>=t} dL_s + <state after, dS>, by one warp.
template <int D>
__device__ inline void store_gate_gradients(const DeltaGradients& p, const ChunkInfo& chunk_info,
                                            const GradientSums<D>& sums, FinishSums<D>& finish_sums,
                                            ChunkFactors chunk_factors) {
  using Sizes = GradientSizes<D>;
  const int n = p.shape.n, bands = chunk_info.bands();
  float state_dot = 0.f;
  if (chunk_info.is_first_head && lane() < Sizes::kThreads / 32) {
    state_dot =
        sums.state_dot[lane()] * exp2_fast(chunk_factors.element(kDeltaLogDecay, kDeltaChunkRows - 1));
  }
  // For each row i: -read_i G_i . S^T k_i - w_i k_i . dS U_i, and the terms of N M and P dP. `read` is the
  // first product, and `state` is w_i k_i . dS U_i - `read`, so the first two terms are -state - 2 read.
  // <state after, dS> is e^{L_C} <S, dS> + sum_i w_i k_i . dS U_i; the loop adds the second term.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane() + 32 * i;
    float sum = 0.f;
    if (chunk_info.is_first_head) {
      float read = 0.f, state = 0.f;
      for (int w = 0; w < Sizes::kValueGroups; ++w) read += sums.read[w][row];
      for (int w = 0; w < Sizes::kGroups; ++w) state += finish_sums.state[w][row];
      read *= chunk_factors.element(kDeltaReadFactor, row);
      if (p.shape.unit) state *= rsqrtf(finish_sums.square[0][row] + 1e-6f);
      state_dot += state + read;
      sum = finish_sums.row[row] - state - 2.f * read;
      for (int w = row / kTileRows; w < kChunkTiles; ++w) sum -= finish_sums.row_cols[w][row];
    }
    for (int w = row / kTileRows / n; w < bands; ++w) sum -= finish_sums.token_cols[w][row];
    __syncwarp();
    finish_sums.row[row] = sum;
  }
  state_dot = sum_over_col(sum_over_row(state_dot));
  __syncwarp();
  float dl[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane() + i;
    float sum = 0.f;
    if (token < chunk_info.range.length) {
      sum = finish_sums.token[token];
      float query = 0.f;
      for (int w = 0; w < Sizes::kGroups; ++w) query += finish_sums.query[w][token];
      sum += query;
      for (int r = token * n; r < (token + 1) * n; ++r) sum += finish_sums.row[r];
    }
    dl[i] = sum;
  }
  // Suffix sums over the lanes: `sum` with this lane, then later_sum without this lane.
  float sum = dl[0] + dl[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float later_sum = __shfl_down_sync(~0u, sum, distance);
    if (lane() + distance < 32) sum += later_sum;
  }
  const float later_sum = __shfl_down_sync(~0u, sum, 1);
  sum = state_dot + (lane() == 31 ? 0.f : later_sum) + dl[1];
#pragma unroll
  for (int i = 1; i >= 0; --i) {
    const int token = 2 * lane() + i;
    if (i == 0) sum += dl[0];
    if (token < chunk_info.range.length) {
      static_cast<float*>(p.dg.data)[offset_of(p.dg, chunk_info.range.sequence.batch,
                                               chunk_info.range.start + token, chunk_info.output_head)] = sum;
    }
  }
}

}  // namespace girih::kernels::delta_product
