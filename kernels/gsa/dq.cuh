// dq, and p and dz for the reverse scan and the dkv kernel: the gradients of query rows. A block has a chunk
// and a query head; warp w of each warpgroup has rows 16 w to 16 w + 15:
//
//     dp_t = Hv_t do_t          dz_t = J_feature^T dp_t          dq_t = scale Hk_t dz_t
//
// dp is a value read of (do, v), dq a key read of dz: only the states of forward are needed.
//
// The block has a warpgroup for each 64 slots. One warpgroup for 128 slots has 117 KB of instructions
// and waits for instructions two thirds of its time. The two warps with the same rows exchange their sums
// over M.
#pragma once

#include "gsa/dq_finish.cuh"

namespace girih::kernels {

template <typename T, int M>
__global__ void __launch_bounds__(kWarpgroupThreads*(M / 64), M == 64 ? 3 : 2)
    gsa_dq_kernel(const __grid_constant__ GsaDq p) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 128);
  GsaDqBlock<T, M> block(p, shared);
  if (block.range.length == 0) return;
  block.start_loads();
  wait_copies<2>();
  __syncthreads();
  block.init_reads();
  wait_copies<1>();
  __syncthreads();

  Accumulator<8> dp;
  AFragment<4> f;
  AFragment<2> w[2];
  {
    Scores W;
    if (block.reads.is_factored) {
      block.template compute_dz<true>(dp, W);
    } else {
      block.template compute_dz<false>(dp, W);
    }
    block.sum_warpgroup_scores(W);
    round_scores<Side::earlier, true, T>(w, W, block.warp);
  }
  round_to_a_fragment<T>(f, dp);
  block.store_dq(f, w);
}

template <typename T, int M>
cudaError_t launch_gsa_dq(const GsaDq& p, cudaStream_t stream) {
  return launch_blocks<gsa_dq_kernel<T, M>>(p, kWarpgroupThreads * (M / 64), GsaDqTiles<T, M>::kBytes,
                                            stream);
}

}  // namespace girih::kernels
