// dq, and q for the reverse scan. A block has a chunk and a query head; warp w has rows 16 w to 16 w + 15:
//
//     dq_t = scale * S_t do_t
//
// This is a value read of (do, v).
#pragma once

#include "gla/kernels.h"
#include "gsa/block.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GlaDqTiles {
  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> k, s;  // s: 64 rows of the state
  SharedTile<T, kChunk, kSlab> v, dout;
  float *totals, *decay, *own;

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 2 * SharedTile<T, kChunk, M>::kBytes +
                                2 * SharedTile<T, kChunk, kSlab>::kBytes + 5 * M * 4 + kChunk * 4;

  __device__ explicit GlaDqTiles(unsigned char* shared) {
    SharedAllocator{shared}(g)(k)(s)(v)(dout)(totals, 4 * M)(decay, M)(own, kChunk);
  }
};

template <typename T, int M>
__global__ void __launch_bounds__(kWarpgroupThreads, M == 64 ? 3 : 2)
    gla_dq_kernel(const __grid_constant__ GlaDq p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const GlaDqTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x >> 5;
  const ChunkBlock block(shape, warp);
  const TokenRange& range = block.range;
  if (range.length == 0) return;

  block.load<kWarpgroupThreads>(tile.g, p.g, block.head, 0, shape.M);
  block.load<kWarpgroupThreads>(tile.k, p.k, block.head, 0, shape.M);
  commit_copies();
  const auto load_slab = [&](int v) {
    block.load<kWarpgroupThreads>(tile.dout, p.dout, block.query_head, v, shape.V);
    block.load<kWarpgroupThreads>(tile.v, p.v, block.head, v, shape.V);
    block.load_states<kWarpgroupThreads>(tile.s, p.states, v, shape.V - v);
    commit_copies();
  };
  load_slab(0);

  wait_copies<1>();
  __syncthreads();
  RowReads<T, M, true> reads;
  // The unscaled keys replace the state.
  reads.operands = {{tile.g, tile.decay, tile.totals, warp}, tile.k, tile.s, {warp_scratch(tile.dout, warp)}};
  reads.template start<4>();
  if (threadIdx.x == 0 && block.is_group_leader())
    p.gate_terms.is_factored[block.chunk * shape.heads + block.head] = reads.is_factored;
  wait_copies<0>();
  __syncthreads();

  // e^L dO S^T + [sum_{j<i} do_i . v_j e^{L_i - L_j} k_j]
  Scores a;
  Accumulator<M / 8> dq;
  zero(a);
  fill(dq, 0.f);
  for_each_slab(shape.V, load_slab,
                [&](int) { add_slab<Side::earlier, T>(a, dq, tile.dout, tile.v, tile.s, warp); });
  store_diagonal(tile.own, a, warp);
  __syncwarp();
  reads.template split_into_subchunks<kWarpgroupThreads>(tile.s, p.k, {}, range, block.head, shape.M);
  // The loads of q are in flight during the read. Rows and columns outside of the array are clamped and not
  // stored.
  uint32_t q_pairs[M / 8][2];
  const T* q_rows = chunk_rows<T>(p.q, range, block.query_head);
  for_each_register_pair<M / 8>([&](int n, int i) {
    const int row = min(kWarpRows * warp + lane_row() + 8 * i, range.length - 1);
    q_pairs[n][i] = *reinterpret_cast<const uint32_t*>(q_rows + row * p.q.stride[1] +
                                                       min(8 * n + lane_col(), shape.M - 2));
  });
  reads.value_read(dq, a);

  // w = q dq without the rows' own tokens, then the remaining terms of dq, and q for the reverse scan.
  const SharedTile<T, kChunk, M> keys{reads.is_factored ? tile.k.data : tile.s.data};
  float* w_rows = chunk_rows<float>(p.gate_terms.w, range, block.query_head);
  Accumulator<M / 8> q;
#pragma unroll
  for (int n = 0; n < M / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = kWarpRows * warp + lane_row() + 8 * i, col = 8 * n + lane_col();
      const bool exists = row < range.length && col < shape.M;
      float2 scaled_q = unpack_pair<T>(q_pairs[n][i]);
      scaled_q.x *= shape.scale, scaled_q.y *= shape.scale;
      float& left = dq.at[n][2 * i];
      float& right = dq.at[n][2 * i + 1];
      const float2 r = reads.factor(i, n);
      scaled_q.x *= r.x, scaled_q.y *= r.y;
      // q as the dkv kernel reads it: rounded after the multiplication by r, or without factors as it is.
      const float2 rounded_q =
          reads.is_factored ? unpack_pair<T>(pack_pair<T>(scaled_q.x, scaled_q.y)) : scaled_q;
      const float2 w = {__fdividef(rounded_q.x * left, r.x), __fdividef(rounded_q.y * right, r.y)};
      if (exists) *reinterpret_cast<float2*>(w_rows + row * p.gate_terms.w.stride[1] + col) = w;
      q.at[n][2 * i] = scaled_q.x, q.at[n][2 * i + 1] = scaled_q.y;
      float2 k = load_lane_pair<T>(keys, kWarpRows * warp + 8 * i, 8 * n);
      k = {k.x * r.x, k.y * r.y};
      const float own = tile.own[row];
      left = shape.scale * fmaf(own, k.x, left), right = shape.scale * fmaf(own, k.y, right);
    }
  }
  if (!reads.is_factored) reads.decay_from_start(q);
  __syncthreads();  // v and do have been read: their tiles are the buffers for the stores
#pragma unroll
  for (int m = 0; m < M; m += kSlab) {
    store_rows<T>(dq, tile.v, warp, p.dq, range, block.query_head, m, shape.M, 0, m / 8);
    store_rows<T>(q, tile.dout, warp, p.q_scan, range, block.query_head, m, shape.M, 0, m / 8);
  }
}

template <typename T, int M>
cudaError_t launch_gla_dq(const GlaDq& p, cudaStream_t stream) {
  return launch_blocks<gla_dq_kernel<T, M>>(p, kWarpgroupThreads, GlaDqTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels
