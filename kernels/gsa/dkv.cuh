// dk, dv, ds and dg: the gradients of key rows. A block has a chunk and a query head; warp w of each
// warpgroup has rows 16 w to 16 w + 15. G is the gradient of the state after the chunk. For each memory, one
// after the other (gsa has keys and values; gla has only the second memory, with k in place of s and q in
// place of p):
//
//     dx_j = G_j s_j         ds_j = sum of G_j^T x_j over the memories
//     G_j = e^{L_C - L_j} G + sum_{t>=j} e^{L_t - L_j} read_t y_t^T
//     dg_t = sum over the memories' rows of G_t * e^{g_t} H_{t-1}
//
// with (x, read, y) = (k, q, scale dz) or (v, do, p). The read of a row's own token passes no gate. Without
// these terms, and with w = z dz + p dp, inside the chunk
//
//     dg_t = <H, gradient of H> - sum_{j<t} (w - s ds)_j
//
// for each slot. The first term is the state dot (StateDot). H is the state before the chunk; the reverse
// scan wrote its gradient as that of the state after the previous chunk. s ds uses s as rounded for G in ds,
// as gsa_dq_kernel did for w, so that the terms of pairs of rows cancel.
//
// If several query heads share a memory head, only the first adds the terms of G.
#pragma once

#include "gsa/dkv_block.cuh"

namespace girih::kernels {

template <typename T, int M, int Memories>
__global__ void __launch_bounds__(kWarpgroupThreads*(M / 64), M == 64 ? 3 : 1)
    gated_dkv_kernel(const __grid_constant__ GatedDkv p) {
  using Block = GatedDkvBlock<T, M, Memories>;
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  Block block(p, shared);
  if (block.range.length == 0) return;
  block.start_loads();
  // Loads of the states for the state dot, while the copies are in flight. The states are in the L2 cache:
  // the block of the previous chunk has read them.
  typename Block::StateDotRows state_dot_rows;
  const bool has_state_dot = block.has_state_dot();
  if (has_state_dot) block.load_state_dot_rows(state_dot_rows, false);

  wait_copies<1>();
  __syncthreads();
  block.start_writes();
  if (has_state_dot) block.load_state_dot_rows(state_dot_rows, true);
  block.store_state_dot(state_dot_rows);
  const bool is_factored = block.writes.is_factored;
  if (!is_factored) block.load_unscaled();
  wait_copies<0>();
  __syncthreads();

  // u = ds of the warpgroup's 64 columns, with factors without e^X. The terms of the rows' own tokens are
  // added last.
  Accumulator<8> u;
  fill(u, 0.f);
  const float* w_rows = chunk_rows<float>(p.w, block.range, block.query_head);
  if (is_factored) {
    block.template accumulate_memories<true>(u, w_rows);
  } else {
    block.template accumulate_memories<false>(u, w_rows);
  }

  float2 w[8][2];
  block.load_w(w, w_rows);
  if (Block::kWarpgroups > 1) __syncthreads();  // store() uses the tile `read` as a buffer
  if (is_factored) {
    block.template compute_ds<true>(u, w);
  } else {
    block.template compute_ds<false>(u, w);
  }
  block.store(u);
}

template <typename T, int M, int Memories>
cudaError_t launch_gated_dkv(const GatedDkv& p, cudaStream_t stream) {
  return launch_blocks<gated_dkv_kernel<T, M, Memories>>(p, kWarpgroupThreads * (M / 64),
                                                         GatedDkvTiles<T, M, Memories>::kBytes, stream);
}

}  // namespace girih::kernels
