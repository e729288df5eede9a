// The kernel of head_read. A chunk has C = 64 tokens, L are the running sums of its gates, S is the state
// before it:
//
//     o_i = scale e^{L_i} q_i S + scale sum_{j<=i} (q_i . k_j) e^{L_i - L_j} v_j
//     S  <- e^{L_C} S + sum_j e^{L_C - L_j} k_j v_j^T
//
// In reverse, from the last chunk to the first, S is the gradient from later chunks:
//
//     o_i = e^{L_C - L_i} q_i S + scale sum_{j>=i} (q_i . k_j) e^{L_j - L_i} v_j
//     S  <- e^{L_C} S + scale sum_j e^{L_j} k_j v_j^T
//
// A block scans a sequence, or a segment of one, for 64 columns of the values of one query head. Its warps
// have four roles:
//   run_loaders()       loaders: copy chunks of q, k, v to rings of stages, and sum the gates
//   run_state_warps()   state warps: hold S^T in registers in fp32, 16 values a warp; store S^T, rounded, in
//   a
//                       ring of states, then compute S <- e^{L_C} S + (w v)^T k
//   run_output_warps()  output warps: warpgroups that compute o; they process chunks round-robin
//   run_store_warps()   store warps: store S to global memory, once for each pair of chunks
// So the output warps get the state through shared memory, and only the update of S is sequential. The
// products are wgmma: with mma.sync, the loads from shared memory would be most of the time of a chunk. State
// warps and output warps load their left factors from shared memory once; a state warp weights the values of
// the next chunk while its product is in flight. (setmaxnreg needs sm_90a; on sm_80 some registers spill.)
#pragma once

#include <algorithm>

#include "gla/head_loaders.cuh"
#include "gla/head_output_warps.cuh"
#include "gla/head_state_warps.cuh"
#include "gla/head_store_warps.cuh"
#include "pipe/fit.h"
#include "tile/grid.h"

namespace girih::kernels {

template <typename T, int D, bool Reverse>
__global__ void __launch_bounds__(kHeadReadThreads, 1)
    head_read_kernel(const __grid_constant__ HeadReadParams params) {
  GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
  HeadBlock<T, D, Reverse> block(params, shared);
  if (!block.init()) return;
  block.init_barriers();
  __syncthreads();
  if (block.warp < kLoaders) {
    block.run_loaders();
  } else if (block.warp < kFirstStateWarp) {
    setmaxnreg_dec<kStoreRegisters>();
    if (block.has_stores) block.run_store_warps();
  } else {
    setmaxnreg_inc<kProductRegisters>();
    if (block.warp < kFirstStateWarp + kStateWarps<D>) {
      block.run_state_warps();
    } else {
      block.run_output_warps();
    }
  }
}

template <typename T, int D, bool Reverse>
cudaError_t launch_head_read(HeadReadParams params, cudaStream_t stream) {
  const HeadShape& shape = params.problem.shape;
  const int scanned_heads =
      params.segmentation.gate_sums != nullptr ? count_state_heads(params.problem) : shape.query_heads;
  const int64_t blocks =
      params.segmentation.count_segments(shape.tokens) * scanned_heads * divide_up(shape.V, kSlab);
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  // Shared memory goes to two states first, then to stages of q and k with as many stages of v, then to more
  // stages of v, then to more states.
  const auto bytes = head_read_bytes<T, D>;
  params.state_stages = fit_stages(limit, 2, [&](int states) { return bytes(1, 1, states); });
  if (params.state_stages < 1) return cudaErrorInvalidConfiguration;
  params.stages =
      fit_stages(limit, kMaxStages, [&](int stages) { return bytes(stages, stages, params.state_stages); });
  params.value_stages = fit_stages(
      limit, kMaxValueStages, [&](int stages) { return bytes(params.stages, stages, params.state_stages); });
  params.state_stages = fit_stages(
      limit, kMaxStateStages, [&](int states) { return bytes(params.stages, params.value_stages, states); });
  // Warpgroups that process chunks round-robin need two stages and two states.
  params.output_warpgroups = std::min({kOutputWarps<D> / 4, params.stages, params.state_stages});
  return launch_kernel<head_read_kernel<T, D, Reverse>>(
      params, blocks, kHeadReadThreads, bytes(params.stages, params.value_stages, params.state_stages),
      stream);
}

}  // namespace girih::kernels
