// o = scale * S^T q. A block has a chunk and a query head; warp w has rows 16 w to 16 w + 15.
#pragma once

#include "gla/kernels.h"
#include "gsa/block.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GlaOutputTiles {
  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> q, k, raw, s;  // s: 64 rows of the state
  SharedTile<T, kChunk, kSlab> v;
  float *totals, *decay;

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 4 * SharedTile<T, kChunk, M>::kBytes +
                                SharedTile<T, kChunk, kSlab>::kBytes + 5 * M * 4;

  __device__ explicit GlaOutputTiles(unsigned char* shared) {
    SharedAllocator{shared}(g)(q)(k)(raw)(s)(v)(totals, 4 * M)(decay, M);
  }
};

template <typename T, int M>
__global__ void __launch_bounds__(kWarpgroupThreads, M == 64 ? 3 : 2)
    gla_output_kernel(const __grid_constant__ GlaOutput p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const GlaOutputTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x >> 5;
  const ChunkBlock block(shape, warp);
  if (block.range.length == 0) return;

  block.load<kWarpgroupThreads>(tile.g, p.g, block.head, 0, shape.M);
  block.load<kWarpgroupThreads>(tile.k, p.k, block.head, 0, shape.M);
  commit_copies();
  const auto load_values = [&](int v) {
    block.load<kWarpgroupThreads>(tile.v, p.v, block.head, v, shape.V);
    block.load_states<kWarpgroupThreads>(tile.s, p.states, v, shape.V - v);
    commit_copies();
  };
  block.load<kWarpgroupThreads>(tile.q, p.q, block.query_head, 0, shape.M);
  load_values(0);

  wait_copies<1>();
  __syncthreads();
  RowReads<T, M> reads;
  reads.operands = {{tile.g, tile.decay, tile.totals, warp}, tile.k, tile.raw, {warp_scratch(tile.q, warp)}};
  reads.template start<4>();
  reads.template split_into_subchunks<kWarpgroupThreads>(tile.raw, p.k, {}, block.range, block.head, shape.M);
  wait_copies<0>();
  __syncthreads();

  // O = (q e^L) S + [q_i . e^{L_i - L_j} k_j, j <= i] V
  AFragment<M / 8 / 2> f;
  AFragment<2> w[2];
  {
    Accumulator<M / 8> q;
    load_scaled_rows<T>(q, tile.q, kWarpRows * warp, shape.scale);
    __syncwarp();
    reads.key_read(q, w);
    round_to_a_fragment<T>(f, q);
  }
  // The warp's rows of the tile q are the buffer for its stores.
  const SharedTile<T, kChunk, kSlab> staging{reinterpret_cast<T*>(warp_scratch(tile.q, warp)) -
                                             warp * kWarpRows * kSlab};
  for_each_slab(shape.V, load_values, [&](int v) {
    Accumulator<8> o;
    fill(o, 0.f);
    add_product_transposed<T>(o, f, tile.s);
    add_score_product<Side::earlier, T>(o, w, tile.v, warp);
    store_rows<T>(o, staging, warp, p.o, block.range, block.query_head, v, shape.V);
  });
}

template <typename T, int M>
cudaError_t launch_gla_output(const GlaOutput& p, cudaStream_t stream) {
  return launch_blocks<gla_output_kernel<T, M>>(p, kWarpgroupThreads, GlaOutputTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels
