// The phases of gsa_rows_kernel after z and dp: dz, the results for gsa_columns and the reverse scan, and dq.
#pragma once

#include "gsa/rows_block.cuh"

namespace girih::kernels {

// Loads z back from the buffer and starts to load k and hk, which the buffer overlaps.
template <typename T, int M>
__device__ inline void GsaRowBlock<T, M>::take_z(Sums<8>& z) {
  renew();
  if constexpr (kGroups > 1) {
    take_sums<Tiles::kAside>(z, aside());
    __syncthreads();
    load_memory_k(last());
    commit_copies();
  } else {
    wait_copies<0>();
    __syncwarp();
  }
}

// Adds the softmax sums of the other warpgroup, which has the other slots of the row.
template <typename T, int M>
__device__ inline void GsaRowBlock<T, M>::join_softmax(SoftmaxSums& own) const {
  if constexpr (kGroups == 1) return;
  const auto at = [&](int g, int i) -> float4& {
    return reinterpret_cast<float4*>(tile.softmax)[g * kChunk + kRows * warp + lane_row() + 8 * i];
  };
  if (lane_col() == 0) {
    at(group, 0) = {own.top.x, own.sum.x, own.delta.x, 0.f};
    at(group, 1) = {own.top.y, own.sum.y, own.delta.y, 0.f};
  }
  meet();
  const auto add = [](float4 other, float& top, float& sum, float& delta) {
    const float both = fmaxf(top, other.x), mine = exp2_fast(top - both), its = exp2_fast(other.x - both);
    top = both;
    sum = sum * mine + other.y * its;
    delta = delta * mine + other.z * its;
  };
  add(at(1 - group, 0), own.top.x, own.sum.x, own.delta.x);
  add(at(1 - group, 1), own.top.y, own.sum.y, own.delta.y);
}

// dz = J_feature^T dp, and w = z dz + p dp without the terms of the rows' own tokens. p and dz, with factors
// multiplied by r, replace z and dp.
template <typename T, int M>
template <bool Factored>
__device__ inline void GsaRowBlock<T, M>::apply_jacobian(Sums<8>& z, Sums<8>& dp) const {
  const SharedTile<T, kChunk, M> weights{kOwnWeights<Factored> ? tile.q.data : tile.hv.data + first};
  const float unscaled = shape.scale == 0.f ? 0.f : 1.f / shape.scale;
  float* const w_first = chunk_rows<float>(p.left.w, piece, query_head) + first + lane_col();
  // The lane's two rows of w, and the number of their columns.
  const int row = kRows * warp + lane_row();
  float* const w_rows[2] = {w_first + row * p.left.w.stride[1], w_first + (row + 8) * p.left.w.stride[1]};
  const int w_cols[2] = {row < piece.length ? slots : 0, row + 8 < piece.length ? slots : 0};
  differentiate(
      z, dp, own_score(0), own_score(1),
      [&](int n, int i) { return lane_pair<T>(weights, kRows * warp + 8 * i, 8 * n); }, shape.feature,
      shape.scale, shape.slots - first, [&](SoftmaxSums& own) { join_softmax(own); },
      [&](int n, int i, float2 of_z, float2 of_dp, float2& prob, float2& dz) {
        // p and dz as the other kernels read them: rounded after the multiplication by r.
        float2 r = {1.f, 1.f};
        if constexpr (Factored) {
          r = reads.at.gates.factor(i, n);
          prob = {prob.x * r.x, prob.y * r.y};
          dz = {dz.x * r.x, dz.y * r.y};
        }
        const float2 seen_p = unpaired<T>(pair_of<T>(prob.x, prob.y)),
                     seen_dz = unpaired<T>(pair_of<T>(dz.x, dz.y));
        float2 w = {unscaled * of_z.x * seen_dz.x + of_dp.x * seen_p.x,
                    unscaled * of_z.y * seen_dz.y + of_dp.y * seen_p.y};
        if constexpr (Factored) w = {divide_fast(w.x, r.x), divide_fast(w.y, r.y)};
        if (8 * n < w_cols[i]) *reinterpret_cast<float2*>(w_rows[i] + 8 * n) = w;
      });
}

// Stores p and dz, which are in z and dp, for the reverse scan and gsa_columns. Overwrites z.
template <typename T, int M>
template <bool Factored>
__device__ inline void GsaRowBlock<T, M>::put_reads(Sums<8>& z, const Sums<8>& dp) const {
  if constexpr (Factored) {
    put(z, p.p_scan);
    put(dp, p.dz_scan);
  } else {
    put(z, p.p);
    put(dp, p.dz);
    reads.decay_from_start(z);
    put(z, p.p_scan);
    z = dp;
    reads.decay_from_start(z);
    put(z, p.dz_scan);
    __syncwarp();
  }
}

// dp becomes dz e^L,   W = [dz_i . e^{L_i - L_j} s_j, j <= i]
template <typename T, int M>
template <bool Factored>
__device__ inline void GsaRowBlock<T, M>::differentiate_rows(Sums<8>& dp, Scores& W) {
  Sums<8> z;
  read_values<Factored>(z, dp);
  take_z(z);
  apply_jacobian<Factored>(z, dp);
  put_reads<Factored>(z, dp);
  reads.template key_read<true>(dp, W);
}

// W = sum of W over the warpgroups. Uses the tile g as a buffer; the gates, and the weights used by put_dq,
// have been read.
template <typename T, int M>
__device__ inline void GsaRowBlock<T, M>::join_scores(Scores& W) const {
  if constexpr (kGroups > 1) {
    float* rows = rows_of(tile.g, warp);
    meet();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (has_half<Side::earlier>(h, warp)) put_sums<4>(rows + (2 * group + h) * 512, W.half[h]);
    }
    meet();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (has_half<Side::earlier>(h, warp)) add_sums(W.half[h], rows + (2 * (1 - group) + h) * 512);
    }
  }
}

// dQ = (dz e^L) Hk^T + [dz_i . e^{L_i - L_j} s_j, j <= i] K = F Hk^T + W K
template <typename T, int M>
__device__ inline void GsaRowBlock<T, M>::put_dq(const Operand<4>& f, const Operand<2> (&w)[2]) {
  constexpr int kEights = 8 / kGroups;  // tiles of 8 columns of the warpgroup
  if constexpr (kGroups > 1) {
    wait_copies<0>();
    __syncthreads();
  }
  for (int d = last(); d >= 0; d -= kSlab) {
    if (d < last()) {
      renew();
      __syncthreads();
      load_memory_k(d);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
    const int col = 8 * kEights * group;
    if constexpr (kGroups > 1) {
      // The terms of the warpgroup's slots for the columns of the other warpgroup.
      Sums<kEights> dq;
      fill(dq, 0.f);
      add_product_transposed<T>(dq, f, tile.hk.from_column(first), kSlab - 8 * kEights - col);
      put_sums<kEights>(rows_of(tile.hv, warp) + (1 - group) * kEights * 128, dq);
    }
    Sums<kEights> dq;
    fill(dq, 0.f);
    add_product_transposed<T>(dq, f, tile.hk.from_column(first), col);
    add_scored<Side::earlier, T>(dq, w, tile.k, warp, col);
    if constexpr (kGroups > 1) {
      meet();
      add_sums(dq, rows_of(tile.hv, warp) + group * kEights * 128);
    }
    store_rows<T, kEights>(dq, stage, warp, p.dq, piece, query_head, d + col, shape.D);
  }
}

}  // namespace girih::kernels
