// The gradients of the gates.
#pragma once

#include "delta_product/gradient_rows.cuh"

namespace girih::kernels::delta_product {

// The thread's share of <S, dS> of a slab. The states are rounded; the initial and the final state of a
// sequence are fp32.
template <typename T, int D, bool OneSlab>
class Edge {
  using Sizes = GradientSizes<D>;
  static constexpr int kPacks = Sizes::kSlab * D / 8 / Sizes::kThreads;
  uint4 ahead_[Sizes::kApart ? 1 : kPacks];  // dS while its shared memory holds S

  __device__ static int row(int pack) { return (pack * Sizes::kThreads + threadIdx.x) / (D / 8); }
  __device__ static int col(int pack) { return (pack * Sizes::kThreads + threadIdx.x) % (D / 8) * 8; }

 public:
  __device__ void load(const DeltaGradients& p, const Here& here, int v) {
    if (Sizes::kApart) return;
    const T* const from = here.state<T>(p.gradients, p.shape, v);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const bool valid = v + row(i) < p.shape.V && col(i) < p.shape.D;
      ahead_[i] =
          valid ? *reinterpret_cast<const uint4*>(from + row(i) * p.shape.D + col(i)) : uint4{0u, 0u, 0u, 0u};
    }
  }

  __device__ float sum(const DeltaGradients& p, const Here& here, const GradientTiles<T, D, OneSlab>& tile,
                       int v) const {
    const bool first = here.piece.index == 0 && p.initial.data != nullptr,
               last =
                   here.piece.start + here.piece.length == here.piece.sequence.end && p.end.data != nullptr;
    float sum = 0.f;
    if (first || last) {
      const auto given = [&](const In<4>& state, const void* rounded, bool exact, int d, int col) {
        if (!exact) {
          return unpaired<T>(
              *reinterpret_cast<const uint32_t*>(here.state<T>(rounded, p.shape, v) + col * p.shape.D + d));
        }
        const float* const at = static_cast<const float*>(state.data) +
                                offset_of(state, here.piece.sequence.index, here.head, d, v + col);
        return make_float2(at[0], at[state.stride[2]]);
      };
      const int cols = min(Sizes::kSlab, p.shape.V - v);
#pragma unroll 1
      for (int i = threadIdx.x; i < cols * p.shape.D / 2; i += Sizes::kThreads) {
        const int d = i / cols * 2, col = i % cols;
        const float2 s = given(p.initial, p.states, first, d, col),
                     ds = given(p.end, p.gradients, last, d, col);
        sum = fmaf(s.x, ds.x, fmaf(s.y, ds.y, sum));
      }
      return sum;
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int of_slab = row(i) % 64;
      const uint4 s = *reinterpret_cast<const uint4*>(&tile.s(row(i)).at(of_slab, col(i)));
      const uint4 ds = Sizes::kApart ? *reinterpret_cast<const uint4*>(&tile.ds(row(i)).at(of_slab, col(i)))
                                     : ahead_[Sizes::kApart ? 0 : i];
      const uint32_t x[4] = {s.x, s.y, s.z, s.w}, y[4] = {ds.x, ds.y, ds.z, ds.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 of_s = unpaired<T>(x[j]), of_ds = unpaired<T>(y[j]);
        sum = fmaf(of_s.x, of_ds.x, fmaf(of_s.y, of_ds.y, sum));
      }
    }
    return sum;
  }
};

// dg_t = sum_{s>=t} dL_s + <state after, dS>, by one warp.
template <int D>
__device__ inline void put_gate_gradients(const DeltaGradients& p, const Here& here,
                                          const GradientSums<D>& sums, LaterSums<D>& later, Vectors vectors) {
  using Sizes = GradientSizes<D>;
  const int n = p.shape.n, bands = here.bands();
  float edge = 0.f;
  if (here.first && lane() < Sizes::kThreads / 32) {
    edge = sums.edge[lane()] * exp2_fast(vectors.element(kDeltaLog, kDeltaRows - 1));
  }
  // For each row: -read G . S^T k - w k . dS U, and its terms of N M and P dP. The sum of w k . dS U is
  // <state after, dS> minus the same for the state before.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = lane() + 32 * i;
    float sum = 0.f;
    if (here.first) {
      float read = 0.f, state = 0.f;
      for (int w = 0; w < Sizes::kParts; ++w) read += sums.read[w][row];
      for (int w = 0; w < Sizes::kGroups; ++w) state += later.state[w][row];
      read *= vectors.element(kDeltaRead, row);
      if (p.shape.unit) state *= rsqrtf(later.square[0][row] + 1e-6f);
      edge += state + read;
      sum = later.row[row] - state - 2.f * read;
      for (int w = row / kTileRows; w < kTilesDown; ++w) sum -= later.row_cols[w][row];
    }
    for (int w = row / kTileRows / n; w < bands; ++w) sum -= later.token_cols[w][row];
    __syncwarp();
    later.row[row] = sum;
  }
  edge = sum_over_col(sum_over_row(edge));
  __syncwarp();
  float dl[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane() + i;
    float sum = 0.f;
    if (token < here.piece.length) {
      sum = later.token[token];
      float query = 0.f;
      for (int w = 0; w < Sizes::kGroups; ++w) query += later.query[w][token];
      sum += query;
      for (int r = token * n; r < (token + 1) * n; ++r) sum += later.row[r];
    }
    dl[i] = sum;
  }
  // Suffix sum over the lanes, first with this lane, then without it.
  float sum = dl[0] + dl[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float further = __shfl_down_sync(~0u, sum, distance);
    if (lane() + distance < 32) sum += further;
  }
  const float further = __shfl_down_sync(~0u, sum, 1);
  sum = edge + (lane() == 31 ? 0.f : further) + dl[1];
#pragma unroll
  for (int i = 1; i >= 0; --i) {
    const int token = 2 * lane() + i;
    if (i == 0) sum += dl[0];
    if (token < here.piece.length) {
      static_cast<float*>(
          p.dg.data)[offset_of(p.dg, here.piece.sequence.batch, here.piece.start + token, here.query_head)] =
          sum;
    }
  }
}

}  // namespace girih::kernels::delta_product
