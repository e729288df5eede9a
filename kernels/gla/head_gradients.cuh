// The gradients of queries, keys and gates, one block a chunk, query head and tile of keys; warp w has rows
// 16 w to 16 w + 15. S the state before the chunk, G the gradient that reaches the state after it:
//
//     dq_i = scale e^{L_i} do_i S^T + sum_{j<=i} near_ij k_j        near_ij = scale (do_i . v_j) e^{L_i -
//     L_j} dk_j = e^{L_C - L_j} v_j G^T  + sum_{i>=j} near_ij q_i
//
// A gate decays what pairs of rows j < t <= i exchange:
//
//     dg_t = e^{L_C} <S, G>                                         both outside of the chunk
//          + sum_{i>=t} q_i . (dq_i through S) + sum_{j<t} k_j . (dk_j through G)
//          + sum_{j<t<=i} near_ij (q_i . k_j)
//
// The last is a sum over i >= t of what rows have less what columns have: the same numbers in fp32, so that
// what does not belong cancels. A tile of keys has its part of every term. Before a sequence's first token
// both states are there in fp32; there <S, dS>, less what the chunk's own rows read, is the first term.
#pragma once

#include "gla/head_gates.cuh"
#include "gla/head_launch.h"
#include "gsa/gradients.cuh"
#include "tile/grid.h"

namespace girih::kernels {

template <typename T, int D>
struct HeadGradientTiles {
  SharedTile<T, kChunk, D> q, k, s, ds;  // s, ds: 64 values of S^T and G^T
  SharedTile<T, kChunk, kSlab> v, dout;
  float *sums, *of_row, *of_col, *pairs, *edge;

  static constexpr int kFloats = kChunk * (3 + 4) + 32;
  static constexpr int kBytes =
      4 * SharedTile<T, kChunk, D>::kBytes + 2 * SharedTile<T, kChunk, kSlab>::kBytes + kFloats * 4;

  __device__ explicit HeadGradientTiles(unsigned char* shared) {
    Layout(shared)(q)(k)(s)(ds)(v)(dout)(sums, kChunk)(of_row, kChunk)(of_col, kChunk)(pairs, 4 * kChunk)(
        edge, 32);
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

template <int N>
__device__ inline void scale_rows(Sums<N>& sums, float upper, float lower) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.at[n][i] *= i < 2 ? upper : lower;
  }
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
  for (int i = threadIdx.x; i < min(D, shape.keys - key) * shape.values; i += kGroup) {
    const int of_key = key + i / shape.values, value = i % shape.values;
    sum = fmaf(state[value * p.initial.stride[2] + of_key * p.initial.stride[3]],
               gradient[value * p.start.stride[2] + of_key * p.start.stride[3]], sum);
  }
  return sum;
}

template <typename T, int D>
__global__ void __launch_bounds__(kGroup, D == 64 ? 3 : 2)
    head_gradients_kernel(const __grid_constant__ HeadGradients p) {
  extern __shared__ __align__(128) unsigned char shared[];
  const HeadGradientTiles<T, D> tile(shared);
  const HeadShape& shape = p.shape;
  const int warp = threadIdx.x >> 5, group = shape.query_heads / shape.heads;
  const unsigned parts = (shape.D + D - 1) / D;
  unsigned job = blockIdx.x;
  const int part = static_cast<int>(job % parts), key = part * D, keys = min(D, shape.D - key);
  job /= parts;
  const int query_head = static_cast<int>(job % shape.query_heads), head = query_head / group;
  const int64_t chunk = piece_in_time(shape.tokens, job / shape.query_heads, kChunk, /*last_first=*/false);
  const Piece piece = piece_at(shape.tokens, chunk, kChunk);
  if (piece.length == 0) return;

  const T* const dout = chunk_rows<T>(p.dout, piece, query_head);
  const T* const values = chunk_rows<T>(p.v, piece, head);
  const int64_t state = static_cast<int64_t>(shape.V) * shape.D;
  const T* const s = static_cast<const T*>(p.states) + (chunk * shape.heads + head) * state + key;
  const T* const ds =
      static_cast<const T*>(p.gradients) + (chunk * shape.query_heads + query_head) * state + key;
  const auto load_slab = [&](int v) {
    const int cols = shape.V - v, first = v * shape.D;
    load_async<kGroup>(tile.dout, dout + v, p.dout.stride[1], piece.length, cols, threadIdx.x);
    load_async<kGroup>(tile.v, values + v, p.v.stride[1], piece.length, cols, threadIdx.x);
    load_async<kGroup>(tile.s, s + first, shape.D, cols, keys, threadIdx.x);
    load_async<kGroup>(tile.ds, ds + first, shape.D, cols, keys, threadIdx.x);
    commit_copies();
  };
  // There is room for one slab: the next waits in the L2 cache. A line of 128 bytes a thread and array.
  const auto prefetch_slab = [&](int v) {
    const int row = threadIdx.x % kSlab, col = static_cast<int>(threadIdx.x) / kSlab * 64;
    if (row < piece.length) {
      prefetch(col == 0 ? dout + row * p.dout.stride[1] + v : values + row * p.v.stride[1] + v);
    }
    if (row < shape.V - v && col < keys) {
      const int64_t at = static_cast<int64_t>(v + row) * shape.D + col;
      prefetch(s + at);
      prefetch(ds + at);
    }
  };
  load_slab(0);
  load_async<kGroup>(tile.q, chunk_rows<T>(p.q, piece, query_head) + key, p.q.stride[1], piece.length, keys,
                     threadIdx.x);
  load_async<kGroup>(tile.k, chunk_rows<T>(p.k, piece, head) + key, p.k.stride[1], piece.length, keys,
                     threadIdx.x);
  commit_copies();
  if (shape.V > kSlab) prefetch_slab(kSlab);
  if (warp == 0) {
    GatePair::load(shape.g, piece.sequence, piece.start, head, piece.length).put_sums(tile.sums);
  }
  const bool wants_gates = p.dg.data != nullptr;
  const bool from_start = piece.index == 0 && p.initial.data != nullptr;

  // do v^T, do S^T, v G^T, <S, G>
  Scores near;
  Sums<D / 8> dq, dk;
  float edge = 0.f;
  zero(near);
  fill(dq, 0.f);
  fill(dk, 0.f);
  wait_copies<1>();
  __syncthreads();
  for (int v = 0;; v += kSlab) {
#pragma unroll 2
    for (int col = 0; col < kSlab; col += 16) {
      uint32_t x[4];
      load_block(x, tile.dout, kRows * warp, col);
      add_scores<Side::earlier, T>(near, x, tile.v, col, warp);
      add_product<T>(dq, x, tile.s, col);
      load_block(x, tile.v, kRows * warp, col);
      add_product<T>(dk, x, tile.ds, col);
    }
    if (wants_gates && !from_start) {
#pragma unroll 4
      for (int i = threadIdx.x; i < kSlab * D / 8; i += kGroup) {
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
    __syncthreads();
    if (v + kSlab >= shape.V) break;
    load_slab(v + kSlab);
    if (v + 2 * kSlab < shape.V) prefetch_slab(v + 2 * kSlab);
    wait_copies<0>();
    __syncthreads();
  }
  wait_copies<0>();
  __syncthreads();

  const int first = kRows * warp + lane_row();
  const float upper = tile.sums[first], lower = tile.sums[first + 8], whole = tile.sums[kChunk - 1];
  scale_rows(dq, shape.scale * exp2_fast(upper), shape.scale * exp2_fast(lower));
  scale_rows(dk, exp2_fast(whole - upper), exp2_fast(whole - lower));
  decay_scores<Side::earlier>(near, tile.sums, shape.scale, warp);

  if (wants_gates) {
    const float read = put_row_products<T>(tile.of_row, dq, tile.q, warp);
    put_row_products<T>(tile.of_col, dk, tile.k, warp);
    if (from_start) edge = product_at_start(p, piece, query_head, key, D);
    edge = sum_over_col(sum_over_row(edge));
    if (lane() == 0) tile.edge[warp] = from_start ? edge - read : edge * exp2_fast(whole);

    // near_ij (q_i . k_j), j < i
    float2 of_row = {0.f, 0.f};
    float* of_cols = tile.pairs + kChunk * warp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Sums<4> pairs;
      fill(pairs, 0.f);
      if (has_half<Side::earlier>(h, warp)) {
#pragma unroll 4
        for (int col = 0; col < D; col += 16) {
          uint32_t x[4];
          load_block(x, tile.q, kRows * warp, col);
          add_product_transposed<T>(pairs, x, tile.k, 32 * h, col);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int col = 32 * h + 8 * n + lane_col();
        float2 of_col = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // A row's own token passes no gate.
          const bool own = first + 8 * (i >> 1) == col + (i & 1);
          const float pair = own ? 0.f : pairs.at[n][i] * near.half[h].at[n][i];
          (i < 2 ? of_row.x : of_row.y) += pair;
          (i & 1 ? of_col.y : of_col.x) += pair;
        }
        of_col = {sum_over_col(of_col.x), sum_over_col(of_col.y)};
        if (lane() < 4) *reinterpret_cast<float2*>(of_cols + col) = of_col;
      }
    }
    of_row = {sum_over_row(of_row.x), sum_over_row(of_row.y)};
    if (lane() % 4 == 0) tile.of_row[first] += of_row.x, tile.of_row[first + 8] += of_row.y;
  }

  // Rounded once, for both sides; for the other rows through the place of v.
  Operand<2> scores[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    round_to<T>(scores[h], near.half[h]);
    if (!has_half<Side::earlier>(h, warp)) continue;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint32_t*>(&lane_at(tile.v, kRows * warp + 8 * i, 32 * h + 8 * n)) =
            scores[h].at[n / 2][2 * (n % 2) + i];
      }
    }
  }
  add_scored<Side::earlier, T>(dq, scores, tile.k, warp);
  __syncthreads();
  for (int row = kRows * warp; row < kChunk; row += kRows) {
    uint32_t x[4];
    load_block_transposed(x, tile.v, kRows * warp, row);
    add_product<T>(dk, x, tile.q, row);
  }
#pragma unroll
  for (int col = 0; col < D; col += kSlab) {
    if (col >= keys) break;
    store_rows<T>(dq, col / 8, tile.dout, warp, chunk_rows<T>(p.dq, piece, query_head) + key + col,
                  p.dq.stride[1], piece.length, keys - col);
    store_rows_of<T>(dk, tile.dout, warp, p.dk, piece, query_head, key + col, shape.D, 0, col / 8);
  }

  if (!wants_gates || warp != 0) return;
  // Rows 2 l and 2 l + 1 a lane.
  float2 row = *reinterpret_cast<const float2*>(tile.of_row + 2 * lane());
  const float2 col = *reinterpret_cast<const float2*>(tile.of_col + 2 * lane());
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 of_col = *reinterpret_cast<const float2*>(tile.pairs + i * kChunk + 2 * lane());
    row.x -= of_col.x, row.y -= of_col.y;
  }
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
  const float outside = tile.edge[0] + tile.edge[1] + tile.edge[2] + tile.edge[3];
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
  head_gradients_kernel<T, D><<<static_cast<unsigned>(blocks), kGroup, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
