// The gradients of queries, keys and gates, one block a chunk, query head and tile of keys. S the state
// before the chunk, G the gradient that reaches the state after it:
//
//     near_ij = scale (do_i . v_j) e^{L_i - L_j}
//     dq_i = scale e^{L_i} do_i S^T + sum_{j<=i} near_ij k_j
//     dk_j = e^{L_C - L_j} v_j G^T  + sum_{i>=j} near_ij q_i
//
// They are the same but for what stands where: a block has a warpgroup for each, which makes near with its
// own rows as rows. The scores come first, of all of V, and what the gate's gradient has of them, before the
// gradients need the registers.
//
// A gate decays what pairs of rows j < t <= i exchange:
//
//     dg_t = e^{L_C} <S, G>                                         both outside of the chunk
//          + sum_{i>=t} q_i . (dq_i through S) + sum_{j<t} k_j . (dk_j through G)
//          + sum_{j<t<=i} near_ij (q_i . k_j)
//
// The last is a sum over i >= t of what rows have less what columns have: the same products in fp32, so that
// what does not belong cancels. A tile of keys has its part of every term. Before a sequence's first token
// both states are there in fp32; there <S, dS>, less what the chunk's own rows read, is the first term.
#pragma once

#include "gla/head_gates.cuh"
#include "gla/head_launch.h"
#include "gsa/gradients.cuh"
#include "tile/grid.h"

namespace girih::kernels {

constexpr int kHeadGradientThreads = 256;

template <typename T, int D>
struct HeadGradientTiles {
  BlockTile<T, D> q, k, s, ds;  // s, ds: 64 values of S^T and G^T
  BlockTile<T, 2 * kSlab> v, dout;
  float *sums, *of_row, *of_col, *pairs, *edge;

  static constexpr int kFloats = 4 * kChunk + 8;
  static constexpr int kBytes =
      4 * BlockTile<T, D>::kBytes + 2 * BlockTile<T, 2 * kSlab>::kBytes + kFloats * 4;

  __device__ explicit HeadGradientTiles(unsigned char* shared) {
    Layout(shared)(q)(k)(s)(ds)(v)(dout)(sums, kChunk)(of_row, kChunk)(of_col, kChunk)(pairs, kChunk)(edge,
                                                                                                      8);
  }
};

// x_i . y_i of the warp's rows, those of y in `rows`; to `to`. The sum over all of them.
template <typename T, int N, class Tile>
__device__ inline float put_row_products(float* to, const Sums<N>& x, const Tile& rows, int warp) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float2 upper = lane_pair<T>(rows, kRows * warp, 8 * n);
    const float2 lower = lane_pair<T>(rows, kRows * warp + 8, 8 * n);
    sum.x = fmaf(x.at[n][0], upper.x, fmaf(x.at[n][1], upper.y, sum.x));
    sum.y = fmaf(x.at[n][2], lower.x, fmaf(x.at[n][3], lower.y, sum.y));
  }
  sum = {sum_over_row(sum.x), sum_over_row(sum.y)};
  if (lane() % 4 == 0) {
    to[kRows * warp + lane_row()] = sum.x;
    to[kRows * warp + lane_row() + 8] = sum.y;
  }
  return sum_over_col(sum.x + sum.y);
}

// A thread's share of <S, dS> before the sequence's first token, keys `key` and the D - 1 after it.
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

template <typename T, int D>
__global__ void __launch_bounds__(kHeadGradientThreads, 2)
    head_gradients_kernel(const __grid_constant__ HeadGradients p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const HeadGradientTiles<T, D> tile(shared);
  const HeadShape& shape = p.shape;
  const int group = shape.query_heads / shape.heads;
  const int all_warps = warp_index();  // products of warpgroups bear no branch of single threads
  const int warp = all_warps % 4;
  const bool of_keys = all_warps >= 4;
  const unsigned parts = (shape.D + D - 1) / D;
  unsigned job = blockIdx.x;
  const int part = static_cast<int>(job % parts), key = part * D, keys = min(D, shape.D - key);
  job /= parts;
  const int query_head = static_cast<int>(job % shape.query_heads), head = query_head / group;
  const int64_t chunk = job / shape.query_heads;
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  constexpr int kThreads = kHeadGradientThreads, kWide = 2 * kSlab;
  const T* const dout = chunk_rows<T>(p.dout, piece, query_head);
  const T* const values = chunk_rows<T>(p.v, piece, head);
  const int64_t state = static_cast<int64_t>(shape.V) * shape.D;
  const T* const s = static_cast<const T*>(p.states) + (chunk * shape.heads + head) * state + key;
  const T* const ds =
      static_cast<const T*>(p.gradients) + (chunk * shape.query_heads + query_head) * state + key;
  const auto load_rows = [&](int v) {
    load_async<kThreads>(tile.dout, dout + v, p.dout.stride[1], piece.length, shape.V - v, threadIdx.x);
    load_async<kThreads>(tile.v, values + v, p.v.stride[1], piece.length, shape.V - v, threadIdx.x);
  };
  const auto load_states = [&](int v) {
    const int cols = shape.V - v, first = v * shape.D;
    load_async<kThreads>(tile.s, s + first, shape.D, cols, keys, threadIdx.x);
    load_async<kThreads>(tile.ds, ds + first, shape.D, cols, keys, threadIdx.x);
  };
  // There is room for one slab of the states: the next waits in the L2 cache. A line of 128 bytes a thread.
  const auto prefetch_states = [&](int v) {
    const int row = threadIdx.x % kSlab, col = static_cast<int>(threadIdx.x) / kSlab % 2 * 64;
    if (row < shape.V - v && col < keys) {
      prefetch((of_keys ? ds : s) + static_cast<int64_t>(v + row) * shape.D + col);
    }
  };
  load_rows(0);
  load_async<kThreads>(tile.q, chunk_rows<T>(p.q, piece, query_head) + key, p.q.stride[1], piece.length, keys,
                       threadIdx.x);
  load_async<kThreads>(tile.k, chunk_rows<T>(p.k, piece, head) + key, p.k.stride[1], piece.length, keys,
                       threadIdx.x);
  commit_copies();
  load_states(0);
  commit_copies();
  if (shape.V > kSlab) prefetch_states(kSlab);
  if (all_warps == 0) {
    GatePair::load(shape.g, piece.sequence, piece.start, head, piece.length).put_sums(tile.sums);
  }
  const bool wants_gates = p.dg.data != nullptr;
  const bool from_start = piece.index == 0 && p.initial.data != nullptr;

  // A warpgroup's x, y, H, z: dq of do, v, S, k; dk of v, do, G, q.
  const BlockTile<T, kWide> x{of_keys ? tile.v.data : tile.dout.data};
  const BlockTile<T, kWide> y{of_keys ? tile.dout.data : tile.v.data};
  const BlockTile<T, D> h{of_keys ? tile.ds.data : tile.s.data}, z{of_keys ? tile.q.data : tile.k.data},
      own{of_keys ? tile.k.data : tile.q.data};

  // near, x y^T so far
  Sums<8> near;
  fill(near, 0.f);
  for (int v = 0; v < shape.V; v += kWide) {
    if (v == 0) {
      wait_copies<1>();
    } else {
      __syncthreads();
      load_rows(v);
      commit_copies();
      wait_copies<0>();
    }
    fence_tiles();
    __syncthreads();
    fence_products(near);
    start_product_transposed(near, x, y);
    commit_products();
    wait_products<0>(near);
  }
  decay_scores(near, tile.sums, shape.scale, warp, of_keys);

  const int first = kRows * warp + lane_row();
  float2 pair = {0.f, 0.f};
  if (wants_gates) {
    // near_ij (q_i . k_j), j < i: the sums over the other side's rows
    Sums<8> pairs;
    fill(pairs, 0.f);
    fence_products(pairs);
    start_product_transposed(pairs, own, z);
    commit_products();
    wait_products<0>(pairs);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A row's own token passes no gate.
        const bool itself = i >> 1 == n % 2 && n / 2 == warp && lane_row() == lane_col() + (i & 1);
        (i < 2 ? pair.x : pair.y) += itself ? 0.f : pairs.at[n][i] * near.at[n][i];
      }
    }
    pair = {sum_over_row(pair.x), sum_over_row(pair.y)};
  }

  // x H, and <S, G>
  Sums<D / 8> gradient;
  fill(gradient, 0.f);
  float edge = 0.f;
  for (int v = 0; v < shape.V; v += kSlab) {
    const bool rows_too = shape.V > kWide && v % kWide == 0;
    if (v != 0 || rows_too) __syncthreads();
    if (v != 0) load_states(v);
    if (rows_too) load_rows(v);
    commit_copies();
    if (v != 0 && v + kSlab < shape.V) prefetch_states(v + kSlab);
    wait_copies<0>();
    fence_tiles();
    __syncthreads();
    fence_products(gradient);
    start_product(gradient, x, v % kWide, h);
    commit_products();
    if (wants_gates && !from_start) {
#pragma unroll 2
      for (int i = threadIdx.x; i < kSlab * D / 8; i += kThreads) {
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
    wait_products<0>(gradient);
  }

  const float upper = tile.sums[first], lower = tile.sums[first + 8], whole = tile.sums[kChunk - 1];
  if (of_keys) {
    scale_rows(gradient, {exp2_fast(whole - upper), exp2_fast(whole - lower)});
  } else {
    scale_rows(gradient, {shape.scale * exp2_fast(upper), shape.scale * exp2_fast(lower)});
  }
  if (wants_gates) {
    const float read = put_row_products<T>(of_keys ? tile.of_col : tile.of_row, gradient, own, warp);
    if (lane() % 4 == 0) {
      float* pairs = of_keys ? tile.pairs : tile.of_row;
      pairs[first] = of_keys ? pair.x : pairs[first] + pair.x;
      pairs[first + 8] = of_keys ? pair.y : pairs[first + 8] + pair.y;
    }
    if (from_start) edge = product_at_start(p, piece, query_head, key, D);
    edge = sum_over_col(sum_over_row(edge));
    if (!from_start) {
      edge *= exp2_fast(whole);
    } else if (!of_keys) {
      edge -= read;
    }
    if (lane() == 0) tile.edge[all_warps] = edge;
  }

  // and near z: rounded here, as ptxas finds no registers for products between else
  Operand<4> scores;
  round_to<T>(scores, near);
  fence_products(gradient);
  start_product<T>(gradient, scores, z);
  commit_products();
  wait_products<0>(gradient);
  // x has no reader left: its rows are the warp's room for rows on their way out.
  of_keys ? barrier_wait(1, 128) : barrier_wait(2, 128);
  const Out<4>& out = of_keys ? p.dk : p.dq;
#pragma unroll
  for (int col = 0; col < D; col += kSlab) {
    if (col >= keys) break;
    store_rows_of<T>(gradient, x.block(0), warp, out, piece, query_head, key + col, shape.D, 0, col / 8);
  }
  __syncthreads();

  if (!wants_gates || all_warps != 0) return;
  // Rows 2 l and 2 l + 1 a lane.
  float2 row = *reinterpret_cast<const float2*>(tile.of_row + 2 * lane());
  const float2 col = *reinterpret_cast<const float2*>(tile.of_col + 2 * lane());
  const float2 pairs = *reinterpret_cast<const float2*>(tile.pairs + 2 * lane());
  row.x -= pairs.x, row.y -= pairs.y;
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
  float outside = 0.f;
#pragma unroll
  for (int i = 0; i < kHeadGradientThreads / 32; ++i) outside += tile.edge[i];
  float* dg = static_cast<float*>(p.dg.data) + piece.sequence.batch * p.dg.stride[0] +
              (piece.start + 2 * lane()) * p.dg.stride[1] + query_head * p.dg.stride[2] +
              part * p.dg.stride[3];
  if (2 * lane() < piece.length) *dg = outside + after + earlier;
  if (2 * lane() + 1 < piece.length) dg[p.dg.stride[1]] = outside + later + row.y + earlier + col.x;
}

template <typename T, int D>
cudaError_t launch_head_gradients(const HeadGradients& p, cudaStream_t stream) {
  constexpr int kBytes = HeadGradientTiles<T, D>::kBytes;
  if (const cudaError_t error = allow_shared<head_gradients_kernel<T, D>>(kBytes); error != cudaSuccess) {
    return error;
  }
  const HeadShape& shape = p.shape;
  const int64_t blocks = piece_count(shape.tokens, kChunk) * shape.query_heads * divide_up(shape.D, D);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  head_gradients_kernel<T, D><<<static_cast<unsigned>(blocks), kHeadGradientThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
