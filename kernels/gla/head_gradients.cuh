// dq, dk and dg for a gate for each head. A block has a chunk, a query head and a tile of keys. The partner
// of a chunk is the other chunk of its pair; ' marks values of the partner. S is the state before the pair, G
// the gradient of the state after the pair:
//
//     near_ij = scale e^{L_i - L_j} (do_i . v_j)
//     dq_i = scale e^{L_i} do_i S^T + sum_{j<=i} near_ij k_j                         first chunk of a pair
//     dq_i = e^{L_i} (scale e^{L'_C} do_i S^T + sum_j cross_ij k'_j) + ...           second chunk
//            cross_ij = scale e^{L'_C - L'_j} (do_i . v'_j)
//     dk_j = e^{L_C - L_j} v_j G^T + sum_{i>=j} near_ij q_i                          second chunk
//     dk_j = e^{L_C - L_j} (e^{L'_C} v_j G^T + sum_i cross_ij q'_i) + ...            first chunk
//            cross_ij = scale e^{L'_i} (do'_i . v_j)
//
// dq and dk have the same form with other operands. A block has a warpgroup for each; a warpgroup computes
// the scores with its own rows as rows, and one of the two warpgroups has the terms with the partner. A
// missing partner has no rows, and e^{L'_C} = 1. The scores over all of V and their terms of dg come first,
// then the gradients in steps of 64 columns, for which there are registers beside both scores.
//
// A gate decays the terms of pairs of rows j < t <= i:
//
//     dg_t = e^{L_C + L'_C} <S, G>                                  both rows outside of the pair of chunks
//          + sum_{i>=t} q_i . (dq_i through S) + sum_{j<t} k_j . (dk_j through G)
//          + sum_{j<t<=i} near_ij (q_i . k_j)
//
// The last term is a sum over i >= t of the terms of rows minus the terms of columns; both use the same fp32
// products, so that the other pairs cancel. For the rows of the chunk, the terms with the partner are added
// to the terms through S or G, because the same gates decay them. For the rows of the partner, only the terms
// through S or G count: the gates of the first chunk of a pair get sum_i q'_i . (dq'_i through S), the gates
// of the second chunk get sum_j k'_j . (dk'_j through G). So a block writes one number for all gates of its
// partner: this sum and half of <S, G>. A tile of keys has its part of every term.
//
// Before the first token of a sequence both states are fp32 arrays. The first term is then <S, dS> minus the
// reads of the pair's rows; the first chunk adds all of it except the reads of the second chunk's rows.
#pragma once

#include "gla/head_gradient_block.cuh"
#include "tile/grid.h"

namespace girih::kernels {

// sums = a, converted back to fp32.
template <typename T>
__device__ inline void to_fp32(Accumulator<8>& sums, const AFragment<4>& a) {
  for_each_register_pair<8>([&](int n, int i) {
    const float2 pair = unpack_pair<T>(a.at[n / 2][n % 2 * 2 + i]);
    sums.at[n][2 * i] = pair.x, sums.at[n][2 * i + 1] = pair.y;
  });
}

// x_i . y_i of the lane's two rows; `rows` is the tile of y.
template <typename T, int N, class Tile>
__device__ inline float2 row_products(const Accumulator<N>& x, const Tile& rows, int warp) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 upper = load_lane_pair<T>(rows, kWarpRows * warp, 8 * n);
    const float2 lower = load_lane_pair<T>(rows, kWarpRows * warp + 8, 8 * n);
    sum.x = fmaf(x.at[n][0], upper.x, fmaf(x.at[n][1], upper.y, sum.x));
    sum.y = fmaf(x.at[n][2], lower.x, fmaf(x.at[n][3], lower.y, sum.y));
  }
  return {sum_over_row(sum.x), sum_over_row(sum.y)};
}

// The thread's part of <S, dS> before the first token of the sequence, for keys `key` to `key` + D - 1.
__device__ inline float initial_state_dot(const HeadGradients& p, const TokenRange& range, int query_head,
                                          int key, int D) {
  const HeadShape& shape = p.shape;
  const auto rows = [&](const InputTensor<4>& x, int head) {
    return static_cast<const float*>(x.data) + range.sequence.index * x.stride[0] + head * x.stride[1];
  };
  const float* state = rows(p.initial, query_head / (shape.query_heads / shape.heads));
  const float* gradient = rows(p.dinitial, query_head);
  float sum = 0.f;
  for (int i = threadIdx.x; i < min(D, shape.keys - key) * shape.values; i += kHeadGradientThreads) {
    const int key_index = key + i / shape.values, value = i % shape.values;
    sum = fmaf(state[value * p.initial.stride[2] + key_index * p.initial.stride[3]],
               gradient[value * p.dinitial.stride[2] + key_index * p.dinitial.stride[3]], sum);
  }
  return sum;
}

// near_ij = scale e^{L_i - L_j} (x_i . y_j), and with a partner cross_ij; both over all of V.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::compute_scores() {
  Accumulator<8> cross;
  fill(near, 0.f);
  fill(cross, 0.f);
  for (int v = 0; v < shape.V; v += kWide) {
    if (v == 0) {
      wait_copies<1>();
    } else {
      __syncthreads();
      load_rows(v);
      load_partner(v);
      commit_copies();
      wait_copies<0>();
    }
    fence_async_proxy();
    __syncthreads();
    wgmma_run([&] { wgmma_start_transposed(near, x, y); }, near);
    if (has_partner_terms) {
      wgmma_run([&] { wgmma_start_transposed(cross, x, tile.partner); }, cross);
    }
  }
  if (has_partner_terms) compute_cross_scores(cross);
  commit_copies();
  decay_scores(near, tile.sums, shape.scale, warp, is_dk);
}

// cross_ij = scale e^{L'_C - L'_j} (do_i . v'_j), or scale e^{L'_i} (do'_i . v_j). All warps of the warpgroup
// have their scores, so z' can replace y'.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::compute_cross_scores(Accumulator<8>& cross) {
  sync_warpgroup();
  const T* const rows =
      is_second() ? chunk_rows<T>(p.k, partner, key_head) : chunk_rows<T>(p.q, partner, q_head);
  load_async<128>(partner_z, rows + key, is_second() ? p.k.stride[1] : p.q.stride[1], partner.length, keys,
                  thread % 128);
  scale_columns(cross, [&](int n) {
    const float2 sum = *reinterpret_cast<const float2*>(tile.partner_sums + 8 * n + lane_col());
    const float chunk_sum = tile.partner_chunk_sum();
    return is_second() ? float2{shape.scale * exp2_fast(chunk_sum - sum.x),
                                shape.scale * exp2_fast(chunk_sum - sum.y)}
                       : float2{shape.scale * exp2_fast(sum.x), shape.scale * exp2_fast(sum.y)};
  });
  round_to_a_fragment<T>(cross_scores, cross);
}

// The terms sum_j near_ij (q_i . k_j) of rows, or minus those of columns. The row's own token passes no gate.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::compute_pair_terms() {
  Accumulator<8> pairs;
  fill(pairs, 0.f);
  wgmma_run([&] { wgmma_start_transposed(pairs, own, z); }, pairs);
  for_each_register<8>([&](int n, int i) {
    // the row's own token passes no gate
    const bool is_self = i >> 1 == n % 2 && n / 2 == warp && lane_row() == lane_col() + (i & 1);
    (i < 2 ? gate_terms.x : gate_terms.y) += is_self ? 0.f : pairs.at[n][i] * near.at[n][i];
  });
  gate_terms = {sum_over_row(gate_terms.x), sum_over_row(gate_terms.y)};
  // The terms of columns are subtracted from those of rows, which are added after the next barriers.
  if (is_dk) {
    if (lane() % 4 == 0) tile.row_terms[first()] = -gate_terms.x, tile.row_terms[first() + 8] = -gate_terms.y;
    gate_terms = {0.f, 0.f};
  }
}

// The thread's part of <S, G>. Each chunk of a pair sums every second part of a slab.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::add_state_dot(bool has_second_half) {
  const int share = is_second() ? kThreads : 0, shares = partner.length > 0 ? 2 * kThreads : kThreads;
  const int packs = (has_second_half ? 2 : 1) * kSlab * kSlab / 8;
#pragma unroll 2
  for (int i = threadIdx.x + share; i < packs; i += shares) {
    const uint4 s_pack = reinterpret_cast<const uint4*>(tile.s.data)[i];
    const uint4 ds_pack = reinterpret_cast<const uint4*>(tile.ds.data)[i];
    const uint32_t s[4] = {s_pack.x, s_pack.y, s_pack.z, s_pack.w};
    const uint32_t ds[4] = {ds_pack.x, ds_pack.y, ds_pack.z, ds_pack.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a = unpack_pair<T>(s[j]), b = unpack_pair<T>(ds[j]);
      state_dot = fmaf(a.x, b.x, fmaf(a.y, b.y, state_dot));
    }
  }
}

// gradient = r (to_state x H + cross z') + near z for 64 columns; gradient contains x H.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::finish_columns(int col) {
  const float chunk_sum = tile.sums[kChunk - 1], upper = tile.sums[first()], lower = tile.sums[first() + 8];
  const float2 r = is_dk ? float2{exp2_fast(chunk_sum - upper), exp2_fast(chunk_sum - lower)}
                         : float2{exp2_fast(upper), exp2_fast(lower)};
  const float to_state =
      (is_dk ? 1.f : shape.scale) * (has_partner_terms ? exp2_fast(tile.partner_chunk_sum()) : 1.f);
  scale_rows(gradient, {to_state, to_state});
  float2 products = {0.f, 0.f};
  if (has_gates) {
    products = row_products<T>(gradient, own.block(col), warp);
    through_state += r.x * products.x + r.y * products.y;
  }
  if (has_partner_terms) {
    wait_copies<1>();  // for z', not for the next slab
    fence_async_proxy();
    sync_warpgroup();
    wgmma_run([&] { wgmma_start<T>(gradient, cross_scores, partner_z, col); }, gradient);
    keep_registers(cross_scores);
    if (has_gates) products = row_products<T>(gradient, own.block(col), warp);
  }
  gate_terms = {fmaf(r.x, products.x, gate_terms.x), fmaf(r.y, products.y, gate_terms.y)};
  scale_rows(gradient, r);
  wgmma_run([&] { wgmma_start<T>(gradient, scores, z, col); }, gradient);
  keep_registers(scores);
}

// The gradient in steps of 64 columns; the copies of the next slab of the states are in flight.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::compute_gradient() {
  fill(gradient, 0.f);
  if (has_gates && is_at_start && !is_second()) state_dot = initial_state_dot(p, range, query_head, key, D);
  if (shape.V > kWide) {
    __syncthreads();
    load_rows(0);
    commit_copies();
    wait_copies<0>();
  } else {
    wait_copies<1>();  // for the slab, not for z'
  }
#pragma unroll 1
  for (Slab at{0, 0};;) {
    fence_async_proxy();
    __syncthreads();
    wgmma_fence(gradient);
    wgmma_start(gradient, x, 0, half(h, 0));
    wgmma_commit();
    const bool has_second_half = shape.V - at.v > kSlab;
    if (has_second_half) {
      wgmma_fence(gradient);
      wgmma_start(gradient, x, kSlab, half(h, 1));
      wgmma_commit();
    }
    if (has_gates && !is_at_start) add_state_dot(has_second_half);
    wgmma_wait<0>(gradient);

    const Slab next = next_slab(at);
    const bool has_next = next.col < keys;
    if (has_next) {
      __syncthreads();
      load_states(next);
      if (shape.V > kWide) load_rows(next.v);
      prefetch_states(next_slab(next));
    }
    commit_copies();
    const int col = at.col;
    at = next;
    if (next.col == col) {
      wait_copies<0>();
      continue;
    }
    finish_columns(col);
    if (D <= kSlab || !has_next) break;
    if (out->dtype == DType::f32) {
      store_columns(gradient, 0, col);
    } else {
      round_to_a_fragment<T>(previous_columns, gradient);
    }
    fill(gradient, 0.f);
    wait_copies<0>();
  }
}

// Writes the terms of rows, of columns and the warp's part of <S, G> for store_dg_parts().
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::store_gate_terms() const {
  float state_dot = sum_over_col(sum_over_row(this->state_dot));
  const float through_state = sum_over_col(this->through_state);
  if (!is_at_start) {
    state_dot *= exp2_fast(tile.sums[kChunk - 1] + tile.partner_chunk_sum());
  } else if (!is_dk) {
    state_dot -= through_state;
  }
  if (lane() == 0) {
    tile.own_state_dots()[threadIdx.x / 32] = state_dot;
    tile.partner_state_dots()[threadIdx.x / 32] = has_partner_terms ? state_dot + through_state : state_dot;
  }
  if (lane() % 4 == 0) {
    if (is_dk) {
      tile.col_terms[first()] = gate_terms.x, tile.col_terms[first() + 8] = gate_terms.y;
    } else {
      tile.row_terms[first()] += gate_terms.x, tile.row_terms[first() + 8] += gate_terms.y;
    }
  }
}

// Stores the columns that are still in registers.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::store() const {
  const int last = (keys - 1) / kSlab * kSlab;
  store_columns(gradient, 0, last);
  if (D > kSlab && last > 0 && out->dtype != DType::f32) {
    Accumulator<8> before;
    to_fp32<T>(before, previous_columns);
    store_columns(before, kSlab, 0);
  }
}

// Writes dg of the chunk's tokens without the term of the partner, and the term for the partner.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::store_dg_parts() const {
  // Lane l has rows 2 l and 2 l + 1.
  const float2 row = *reinterpret_cast<const float2*>(tile.row_terms + 2 * lane());
  const float2 col = *reinterpret_cast<const float2*>(tile.col_terms + 2 * lane());
  float after = row.x + row.y, before = col.x + col.y;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float later = __shfl_down_sync(~0u, after, step), earlier = __shfl_up_sync(~0u, before, step);
    if (lane() + step < 32) after += later;
    if (lane() >= step) before += earlier;
  }
  float later = __shfl_down_sync(~0u, after, 1), earlier = __shfl_up_sync(~0u, before, 1);
  if (lane() == 31) later = 0.f;
  if (lane() == 0) earlier = 0.f;
  float outside = 0.f, partner_sum = 0.f;
#pragma unroll
  for (int i = 0; i < kHeadGradientThreads / 32; ++i) {
    outside += tile.own_state_dots()[i], partner_sum += tile.partner_state_dots()[i];
  }
  if (lane() == 0) p.partner_gate_terms[blockIdx.x] = partner_sum;
  const unsigned terms_per_token = shape.query_heads * ((shape.D + D - 1) / D);
  const int64_t token = range.sequence.batch * shape.tokens.tokens + range.start + 2 * lane();
  float* dg = p.dg_parts + token * terms_per_token + blockIdx.x % terms_per_token;
  if (2 * lane() < range.length) *dg = outside + after + earlier;
  if (2 * lane() + 1 < range.length) dg[terms_per_token] = outside + later + row.y + earlier + col.x;
}

template <typename T, int D>
__global__ void __launch_bounds__(kHeadGradientThreads, 2)
    head_gradients_kernel(const __grid_constant__ HeadGradients p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
  HeadGradientBlock<T, D> block(p, shared);
  if (!block.init()) return;
  block.start();
  block.compute_scores();
  if (block.has_gates) block.compute_pair_terms();
  round_to_a_fragment<T>(block.scores, block.near);
  block.compute_gradient();
  if (block.has_gates) block.store_gate_terms();
  // x has been read: it is the buffer for the stores.
  block.sync_warpgroup();
  block.store();
  __syncthreads();
  if (block.has_gates && threadIdx.x < 32) block.store_dg_parts();
}

template <typename T, int D>
cudaError_t launch_head_gradients(const HeadGradients& p, cudaStream_t stream) {
  constexpr int kBytes = HeadGradientTiles<T, D>::kBytes;
  static_assert(2 * (kBytes + 1024) <= 228 * 1024,
                "two blocks fit on a multiprocessor, which reserves 1 KB for each");
  const HeadShape& shape = p.shape;
  const int64_t blocks = token_range_count(shape.tokens, kChunk) * shape.query_heads * divide_up(shape.D, D);
  return launch_kernel<head_gradients_kernel<T, D>>(p, blocks, kHeadGradientThreads, kBytes, stream);
}

}  // namespace girih::kernels
