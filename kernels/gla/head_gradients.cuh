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
__device__ inline void widen(Sums<8>& sums, const Operand<4>& a) {
  each_pair<8>([&](int n, int i) {
    const float2 pair = unpaired<T>(a.at[n / 2][n % 2 * 2 + i]);
    sums.at[n][2 * i] = pair.x, sums.at[n][2 * i + 1] = pair.y;
  });
}

// x_i . y_i of the lane's two rows; `rows` is the tile of y.
template <typename T, int N, class Tile>
__device__ inline float2 row_products(const Sums<N>& x, const Tile& rows, int warp) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 upper = lane_pair<T>(rows, kRows * warp, 8 * n);
    const float2 lower = lane_pair<T>(rows, kRows * warp + 8, 8 * n);
    sum.x = fmaf(x.at[n][0], upper.x, fmaf(x.at[n][1], upper.y, sum.x));
    sum.y = fmaf(x.at[n][2], lower.x, fmaf(x.at[n][3], lower.y, sum.y));
  }
  return {sum_over_row(sum.x), sum_over_row(sum.y)};
}

// The thread's part of <S, dS> before the first token of the sequence, for keys `key` to `key` + D - 1.
__device__ inline float product_at_start(const HeadGradients& p, const Piece& piece, int query_head, int key,
                                         int D) {
  const HeadShape& shape = p.shape;
  const auto rows = [&](const In<4>& x, int head) {
    return static_cast<const float*>(x.data) + piece.sequence.index * x.stride[0] + head * x.stride[1];
  };
  const float* state = rows(p.initial, query_head / (shape.query_heads / shape.heads));
  const float* gradient = rows(p.start, query_head);
  float sum = 0.f;
  for (int i = threadIdx.x; i < min(D, shape.keys - key) * shape.values; i += kHeadGradientThreads) {
    const int of_key = key + i / shape.values, value = i % shape.values;
    sum = fmaf(state[value * p.initial.stride[2] + of_key * p.initial.stride[3]],
               gradient[value * p.start.stride[2] + of_key * p.start.stride[3]], sum);
  }
  return sum;
}

// near_ij = scale e^{L_i - L_j} (x_i . y_j), and with a partner cross_ij; both over all of V.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::make_scores() {
  Sums<8> cross;
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
    fence_tiles();
    __syncthreads();
    run_products([&] { start_product_transposed(near, x, y); }, near);
    if (crosses) {
      run_products([&] { start_product_transposed(cross, x, tile.partner); }, cross);
    }
  }
  if (crosses) cross_over(cross);
  commit_copies();
  decay_scores(near, tile.sums, shape.scale, warp, of_keys);
}

// cross_ij = scale e^{L'_C - L'_j} (do_i . v'_j), or scale e^{L'_i} (do'_i . v_j). All warps of the warpgroup
// have their scores, so z' can replace y'.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::cross_over(Sums<8>& cross) {
  group_barrier();
  const T* const rows =
      is_second() ? chunk_rows<T>(p.k, partner, key_head) : chunk_rows<T>(p.q, partner, head_of_query);
  load_async<128>(partner_z, rows + key, is_second() ? p.k.stride[1] : p.q.stride[1], partner.length, keys,
                  thread % 128);
  scale_columns(cross, [&](int n) {
    const float2 sum = *reinterpret_cast<const float2*>(tile.partner_sums + 8 * n + lane_col());
    const float whole = tile.partner_whole();
    return is_second()
               ? float2{shape.scale * exp2_fast(whole - sum.x), shape.scale * exp2_fast(whole - sum.y)}
               : float2{shape.scale * exp2_fast(sum.x), shape.scale * exp2_fast(sum.y)};
  });
  round_to<T>(far, cross);
}

// The terms sum_j near_ij (q_i . k_j) of rows, or minus those of columns. The row's own token passes no gate.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::read_pairs() {
  Sums<8> pairs;
  fill(pairs, 0.f);
  run_products([&] { start_product_transposed(pairs, own, z); }, pairs);
  each_sum<8>([&](int n, int i) {
    // the row's own token passes no gate
    const bool itself = i >> 1 == n % 2 && n / 2 == warp && lane_row() == lane_col() + (i & 1);
    (i < 2 ? read.x : read.y) += itself ? 0.f : pairs.at[n][i] * near.at[n][i];
  });
  read = {sum_over_row(read.x), sum_over_row(read.y)};
  // The terms of columns are subtracted from those of rows, which are added after the next barriers.
  if (of_keys) {
    if (lane() % 4 == 0) tile.of_row[first()] = -read.x, tile.of_row[first() + 8] = -read.y;
    read = {0.f, 0.f};
  }
}

// The thread's part of <S, G>. Each chunk of a pair sums every second part of a slab.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::add_edge(bool both) {
  const int share = is_second() ? kThreads : 0, shares = partner.length > 0 ? 2 * kThreads : kThreads;
  const int packs = (both ? 2 : 1) * kSlab * kSlab / 8;
#pragma unroll 2
  for (int i = threadIdx.x + share; i < packs; i += shares) {
    const uint4 of_s = reinterpret_cast<const uint4*>(tile.s.data)[i];
    const uint4 of_ds = reinterpret_cast<const uint4*>(tile.ds.data)[i];
    const uint32_t s[4] = {of_s.x, of_s.y, of_s.z, of_s.w};
    const uint32_t ds[4] = {of_ds.x, of_ds.y, of_ds.z, of_ds.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a = unpaired<T>(s[j]), b = unpaired<T>(ds[j]);
      edge = fmaf(a.x, b.x, fmaf(a.y, b.y, edge));
    }
  }
}

// gradient = r (to_state x H + cross z') + near z for 64 columns; gradient contains x H.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::add_columns(int col) {
  const float whole = tile.sums[kChunk - 1], upper = tile.sums[first()], lower = tile.sums[first() + 8];
  const float2 r = of_keys ? float2{exp2_fast(whole - upper), exp2_fast(whole - lower)}
                           : float2{exp2_fast(upper), exp2_fast(lower)};
  const float to_state = (of_keys ? 1.f : shape.scale) * (crosses ? exp2_fast(tile.partner_whole()) : 1.f);
  scale_rows(gradient, {to_state, to_state});
  float2 products = {0.f, 0.f};
  if (wants_gates) {
    products = row_products<T>(gradient, own.block(col), warp);
    of_state += r.x * products.x + r.y * products.y;
  }
  if (crosses) {
    wait_copies<1>();  // for z', not for the next slab
    fence_tiles();
    group_barrier();
    run_products([&] { start_product<T>(gradient, far, partner_z, col); }, gradient);
    keep(far);
    if (wants_gates) products = row_products<T>(gradient, own.block(col), warp);
  }
  read = {fmaf(r.x, products.x, read.x), fmaf(r.y, products.y, read.y)};
  scale_rows(gradient, r);
  run_products([&] { start_product<T>(gradient, scores, z, col); }, gradient);
  keep(scores);
}

// The gradient in steps of 64 columns; the copies of the next slab of the states are in flight.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::make_gradient() {
  fill(gradient, 0.f);
  if (wants_gates && from_start && !is_second()) edge = product_at_start(p, piece, query_head, key, D);
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
    fence_tiles();
    __syncthreads();
    fence_products(gradient);
    start_product(gradient, x, 0, half(h, 0));
    commit_products();
    const bool both = shape.V - at.v > kSlab;
    if (both) {
      fence_products(gradient);
      start_product(gradient, x, kSlab, half(h, 1));
      commit_products();
    }
    if (wants_gates && !from_start) add_edge(both);
    wait_products<0>(gradient);

    const Slab next = next_of(at);
    const bool follows = next.col < keys;
    if (follows) {
      __syncthreads();
      load_states(next);
      if (shape.V > kWide) load_rows(next.v);
      prefetch_states(next_of(next));
    }
    commit_copies();
    const int col = at.col;
    at = next;
    if (next.col == col) {
      wait_copies<0>();
      continue;
    }
    add_columns(col);
    if (D <= kSlab || !follows) break;
    if (out->dtype == DType::f32) {
      put(gradient, 0, col);
    } else {
      round_to<T>(done, gradient);
    }
    fill(gradient, 0.f);
    wait_copies<0>();
  }
}

// Writes the terms of rows, of columns and the warp's part of <S, G> for put_gates().
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::put_edges() const {
  float edge = sum_over_col(sum_over_row(this->edge));
  const float of_state = sum_over_col(this->of_state);
  if (!from_start) {
    edge *= exp2_fast(tile.sums[kChunk - 1] + tile.partner_whole());
  } else if (!of_keys) {
    edge -= of_state;
  }
  if (lane() == 0) {
    tile.own_edge()[threadIdx.x / 32] = edge;
    tile.partner_edge()[threadIdx.x / 32] = crosses ? edge + of_state : edge;
  }
  if (lane() % 4 == 0) {
    if (of_keys) {
      tile.of_col[first()] = read.x, tile.of_col[first() + 8] = read.y;
    } else {
      tile.of_row[first()] += read.x, tile.of_row[first() + 8] += read.y;
    }
  }
}

// Stores the columns that are still in registers.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::store() const {
  const int last = (keys - 1) / kSlab * kSlab;
  put(gradient, 0, last);
  if (D > kSlab && last > 0 && out->dtype != DType::f32) {
    Sums<8> before;
    widen<T>(before, done);
    put(before, kSlab, 0);
  }
}

// Writes dg of the chunk's tokens without the term of the partner, and the term for the partner.
template <typename T, int D>
__device__ inline void HeadGradientBlock<T, D>::put_gates() const {
  // Lane l has rows 2 l and 2 l + 1.
  const float2 row = *reinterpret_cast<const float2*>(tile.of_row + 2 * lane());
  const float2 col = *reinterpret_cast<const float2*>(tile.of_col + 2 * lane());
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
  float outside = 0.f, of_partner = 0.f;
#pragma unroll
  for (int i = 0; i < kHeadGradientThreads / 32; ++i) {
    outside += tile.own_edge()[i], of_partner += tile.partner_edge()[i];
  }
  if (lane() == 0) p.across[blockIdx.x] = of_partner;
  const unsigned of_token = shape.query_heads * ((shape.D + D - 1) / D);
  const int64_t token = piece.sequence.batch * shape.tokens.tokens + piece.start + 2 * lane();
  float* dg = p.dg_parts + token * of_token + blockIdx.x % of_token;
  if (2 * lane() < piece.length) *dg = outside + after + earlier;
  if (2 * lane() + 1 < piece.length) dg[of_token] = outside + later + row.y + earlier + col.x;
}

template <typename T, int D>
__global__ void __launch_bounds__(kHeadGradientThreads, 2)
    head_gradients_kernel(const __grid_constant__ HeadGradients p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  HeadGradientBlock<T, D> block(p, shared);
  if (!block.find()) return;
  block.start();
  block.make_scores();
  if (block.wants_gates) block.read_pairs();
  round_to<T>(block.scores, block.near);
  block.make_gradient();
  if (block.wants_gates) block.put_edges();
  // x has been read: it is the buffer for the stores.
  block.group_barrier();
  block.store();
  __syncthreads();
  if (block.wants_gates && threadIdx.x < 32) block.put_gates();
}

template <typename T, int D>
cudaError_t launch_head_gradients(const HeadGradients& p, cudaStream_t stream) {
  constexpr int kBytes = HeadGradientTiles<T, D>::kBytes;
  static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks of a multiprocessor, each gives 1 KB away");
  const HeadShape& shape = p.shape;
  const int64_t blocks = piece_count(shape.tokens, kChunk) * shape.query_heads * divide_up(shape.D, D);
  return launch_kernel<head_gradients_kernel<T, D>>(p, blocks, kHeadGradientThreads, kBytes, stream);
}

}  // namespace girih::kernels
