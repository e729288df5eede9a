// o = Hv^T feature(scale * Hk^T q). A block has a chunk and a query head; warp w has rows 16 w to 16 w + 15.
//
// Columns of D and V are processed 64 at a time. Logits and p stay in registers from the first slab of D to
// the last slab of V.
#pragma once

#include "gsa/block.cuh"
#include "gsa/feature.cuh"

namespace girih::kernels {

template <typename T, int M>
struct GsaOutputTiles {
  SharedTile<float, kChunk, M> g;
  SharedTile<T, kChunk, M> s, hk, hv;
  SharedTile<T, kChunk, kSlab> q, k, v;
  float *totals, *decay;

  static constexpr int kBytes = SharedTile<float, kChunk, M>::kBytes + 3 * SharedTile<T, kChunk, M>::kBytes +
                                3 * SharedTile<T, kChunk, kSlab>::kBytes + 5 * M * 4;

  __device__ explicit GsaOutputTiles(unsigned char* shared) {
    SharedAllocator{shared}(g)(s)(hk)(hv)(q)(k)(v)(totals, 4 * M)(decay, M);
  }
};

template <typename T, int M>
__global__ void __launch_bounds__(kWarpgroupThreads, M == 64 ? 3 : 2)
    gsa_output_kernel(const __grid_constant__ GsaOutput p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  const GsaOutputTiles<T, M> tile(shared);
  const GsaShape& shape = p.shape;
  const int warp = threadIdx.x >> 5;
  const ChunkBlock block(shape, warp);
  if (block.range.length == 0) return;

  const auto load_keys = [&](int d) {
    block.load<kWarpgroupThreads>(tile.q, p.q, block.query_head, d, shape.D);
    block.load<kWarpgroupThreads>(tile.k, p.k, block.head, d, shape.D);
    block.load_states<kWarpgroupThreads>(tile.hk, p.states, d, shape.D - d);
    commit_copies();
  };
  const auto load_values = [&](int v) {
    block.load<kWarpgroupThreads>(tile.v, p.v, block.head, v, shape.V);
    block.load_states<kWarpgroupThreads>(tile.hv, p.states, shape.D + v, shape.V - v);
    commit_copies();
  };
  block.load_slots<kWarpgroupThreads>(tile.g, p.g, tile.s, p.s);
  load_keys(0);
  load_values(0);

  wait_copies<2>();
  __syncthreads();
  RowReads<T, M> reads;
  // The scratch of a warp is its rows of the tile q, which the warp has read by then.
  reads.operands = {{tile.g, tile.decay, tile.totals, warp}, tile.s, tile.hk, {warp_scratch(tile.q, warp)}};
  reads.template start<4>();

  // a = Q K^T,  logits = Q Hk
  Scores a;
  Accumulator<M / 8> logits;
  zero(a);
  fill(logits, 0.f);
  wait_copies<1>();
  __syncthreads();
  for_each_slab(shape.D, load_keys,
                [&](int) { add_slab<Side::earlier, T>(a, logits, tile.q, tile.k, tile.hk, warp); });

  // logits = scale (e^L Q Hk + [sum_j a_ij e^{L_i - L_j} s_j])
  reads.template split_into_subchunks<kWarpgroupThreads>(tile.hk, p.s, p.g, block.range, block.head, shape.M);
  reads.value_read(logits, a);

  // p = feature(logits), for softmax without the division
  float2 inverse_sum;
  apply_feature(logits, shape.feature, shape.scale, shape.slots, inverse_sum);

  // O = (p e^L) Hv + [p_i . e^{L_i - L_j} s_j, j <= i] V
  AFragment<M / 8 / 2> f;
  AFragment<2> w[2];
  reads.key_read(logits, w);
  round_to_a_fragment<T>(f, logits);
  wait_copies<0>();
  __syncthreads();
  for_each_slab(shape.V, load_values, [&](int v) {
    Accumulator<8> o;
    fill(o, 0.f);
    add_product_transposed<T>(o, f, tile.hv);
    add_score_product<Side::earlier, T>(o, w, tile.v, warp);
    for_each_register<8>([&](int n, int i) { o.at[n][i] *= i < 2 ? inverse_sum.x : inverse_sum.y; });
    store_rows<T>(o, tile.q, warp, p.o, block.range, block.query_head, v, shape.V);
  });
}

template <typename T, int M>
cudaError_t launch_gsa_output(const GsaOutput& p, cudaStream_t stream) {
  return launch_blocks<gsa_output_kernel<T, M>>(p, kWarpgroupThreads, GsaOutputTiles<T, M>::kBytes, stream);
}

}  // namespace girih::kernels
