// The phases of gsa_dq_kernel after z and dp: dz, the results for gsa_dkv and the reverse scan, and dq.
#pragma once

#include "gsa/dq_block.cuh"

namespace girih::kernels {

// Loads z back from the buffer and starts to load k and hk, which the buffer overlaps.
template <typename T, int M>
__device__ inline void GsaDqBlock<T, M>::restore_z(Accumulator<8>& z) {
  recompute_addresses();
  if constexpr (kWarpgroups > 1) {
    load_accumulator<Tiles::kSpillTiles>(z, spill_buffer());
    __syncthreads();
    load_memory_k(last_slab());
    commit_copies();
  } else {
    wait_copies<0>();
    __syncwarp();
  }
}

// Adds the softmax sums of the other warpgroup, which has the other slots of the row.
template <typename T, int M>
__device__ inline void GsaDqBlock<T, M>::merge_softmax_sums(SoftmaxSums& sums) const {
  if constexpr (kWarpgroups == 1) return;
  const auto at = [&](int g, int i) -> float4& {
    return reinterpret_cast<float4*>(tile.softmax)[g * kChunk + kWarpRows * warp + lane_row() + 8 * i];
  };
  if (lane_col() == 0) {
    at(warpgroup, 0) = {sums.max_logit.x, sums.sum.x, sums.delta.x, 0.f};
    at(warpgroup, 1) = {sums.max_logit.y, sums.sum.y, sums.delta.y, 0.f};
  }
  sync_row_warps();
  const auto add = [](float4 other, float& max_logit, float& sum, float& delta) {
    const float both = fmaxf(max_logit, other.x), own_factor = exp2_fast(max_logit - both),
                other_factor = exp2_fast(other.x - both);
    max_logit = both;
    sum = sum * own_factor + other.y * other_factor;
    delta = delta * own_factor + other.z * other_factor;
  };
  add(at(1 - warpgroup, 0), sums.max_logit.x, sums.sum.x, sums.delta.x);
  add(at(1 - warpgroup, 1), sums.max_logit.y, sums.sum.y, sums.delta.y);
}

// dz = J_feature^T dp, and w = z dz + p dp without the terms of the rows' own tokens. p and dz, with factors
// multiplied by r, replace z and dp.
template <typename T, int M>
template <bool IsFactored>
__device__ inline void GsaDqBlock<T, M>::apply_jacobian(Accumulator<8>& z, Accumulator<8>& dp) const {
  const SharedTile<T, kChunk, M> weights{kLoadsSelfWeights<IsFactored> ? tile.q.data
                                                                       : tile.hv.data + first_slot};
  const float inverse_scale = shape.scale == 0.f ? 0.f : 1.f / shape.scale;
  float* const w_first = chunk_rows<float>(p.gate_terms.w, range, query_head) + first_slot + lane_col();
  // The lane's two rows of w, and the number of their columns.
  const int row = kWarpRows * warp + lane_row();
  float* const w_rows[2] = {w_first + row * p.gate_terms.w.stride[1],
                            w_first + (row + 8) * p.gate_terms.w.stride[1]};
  const int w_cols[2] = {row < range.length ? slots : 0, row + 8 < range.length ? slots : 0};
  differentiate_feature(
      z, dp, self_score(0), self_score(1),
      [&](int n, int i) { return load_lane_pair<T>(weights, kWarpRows * warp + 8 * i, 8 * n); },
      shape.feature, shape.scale, shape.slots - first_slot,
      [&](SoftmaxSums& sums) { merge_softmax_sums(sums); },
      [&](int n, int i, float2 z_value, float2 dp_value, float2& prob, float2& dz) {
        // p and dz as the other kernels read them: rounded after the multiplication by r.
        float2 r = {1.f, 1.f};
        if constexpr (IsFactored) {
          r = reads.operands.gates.factor(i, n);
          prob = {prob.x * r.x, prob.y * r.y};
          dz = {dz.x * r.x, dz.y * r.y};
        }
        const float2 rounded_p = unpack_pair<T>(pack_pair<T>(prob.x, prob.y)),
                     rounded_dz = unpack_pair<T>(pack_pair<T>(dz.x, dz.y));
        float2 w = {inverse_scale * z_value.x * rounded_dz.x + dp_value.x * rounded_p.x,
                    inverse_scale * z_value.y * rounded_dz.y + dp_value.y * rounded_p.y};
        if constexpr (IsFactored) w = {divide_fast(w.x, r.x), divide_fast(w.y, r.y)};
        if (8 * n < w_cols[i]) *reinterpret_cast<float2*>(w_rows[i] + 8 * n) = w;
      });
}

// Stores p and dz, which are in z and dp, for the reverse scan and the dkv kernel. Overwrites z.
template <typename T, int M>
template <bool IsFactored>
__device__ inline void GsaDqBlock<T, M>::store_p_and_dz(Accumulator<8>& z, const Accumulator<8>& dp) const {
  if constexpr (IsFactored) {
    store_slots(z, p.p_scan);
    store_slots(dp, p.dz_scan);
  } else {
    store_slots(z, p.p);
    store_slots(dp, p.dz);
    reads.decay_from_start(z);
    store_slots(z, p.p_scan);
    z = dp;
    reads.decay_from_start(z);
    store_slots(z, p.dz_scan);
    __syncwarp();
  }
}

// dp becomes dz e^L,   W = [dz_i . e^{L_i - L_j} s_j, j <= i]
template <typename T, int M>
template <bool IsFactored>
__device__ inline void GsaDqBlock<T, M>::compute_dz(Accumulator<8>& dp, Scores& W) {
  Accumulator<8> z;
  compute_z_and_dp<IsFactored>(z, dp);
  restore_z(z);
  apply_jacobian<IsFactored>(z, dp);
  store_p_and_dz<IsFactored>(z, dp);
  reads.template key_read<true>(dp, W);
}

// W = sum of W over the warpgroups. Uses the tile g as a buffer; the gates, and the weights used by store_dq,
// have been read.
template <typename T, int M>
__device__ inline void GsaDqBlock<T, M>::sum_warpgroup_scores(Scores& W) const {
  if constexpr (kWarpgroups > 1) {
    float* rows = warp_scratch(tile.g, warp);
    sync_row_warps();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (has_half<Side::earlier>(h, warp)) store_accumulator<4>(rows + (2 * warpgroup + h) * 512, W.half[h]);
    }
    sync_row_warps();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (has_half<Side::earlier>(h, warp))
        add_accumulator(W.half[h], rows + (2 * (1 - warpgroup) + h) * 512);
    }
  }
}

// dQ = (dz e^L) Hk^T + [dz_i . e^{L_i - L_j} s_j, j <= i] K = F Hk^T + W K
template <typename T, int M>
__device__ inline void GsaDqBlock<T, M>::store_dq(const AFragment<4>& f, const AFragment<2> (&w)[2]) {
  constexpr int kEights = 8 / kWarpgroups;  // tiles of 8 columns of the warpgroup
  if constexpr (kWarpgroups > 1) {
    wait_copies<0>();
    __syncthreads();
  }
  for (int d = last_slab(); d >= 0; d -= kSlab) {
    if (d < last_slab()) {
      recompute_addresses();
      __syncthreads();
      load_memory_k(d);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
    }
    const int col = 8 * kEights * warpgroup;
    if constexpr (kWarpgroups > 1) {
      // The terms of the warpgroup's slots for the columns of the other warpgroup.
      Accumulator<kEights> dq;
      fill(dq, 0.f);
      add_product_transposed<T>(dq, f, tile.hk.from_column(first_slot), kSlab - 8 * kEights - col);
      store_accumulator<kEights>(warp_scratch(tile.hv, warp) + (1 - warpgroup) * kEights * 128, dq);
    }
    Accumulator<kEights> dq;
    fill(dq, 0.f);
    add_product_transposed<T>(dq, f, tile.hk.from_column(first_slot), col);
    add_score_product<Side::earlier, T>(dq, w, tile.k, warp, col);
    if constexpr (kWarpgroups > 1) {
      sync_row_warps();
      add_accumulator(dq, warp_scratch(tile.hv, warp) + warpgroup * kEights * 128);
    }
    store_rows<T, kEights>(dq, staging, warp, p.dq, range, query_head, d + col, shape.D);
  }
}

}  // namespace girih::kernels
