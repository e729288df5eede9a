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
//   load()        loaders: copy chunks of q, k, v to rings of stages, and sum the gates
//   keep_state()  state warps: S^T in registers in fp32, 16 values for each warp; write S^T, rounded, to a
//   ring of
//                 states, then S <- e^{L_C} S + (w v)^T k
//   read()        output warps: warpgroups that compute o; they process chunks round-robin
//   publish()     store warps: store S to global memory, once for each pair of chunks
// So the output warps get the state through shared memory, and only the update of S is sequential. The
// products are wgmma: with mma.sync, the loads from shared memory would be most of the time of a chunk. State
// warps and output warps load their left factors from shared memory once; a state warp weights the values of
// the next chunk while its product is in flight. (setmaxnreg needs sm_90a; on sm_80 some registers spill.)
#pragma once

#include <algorithm>

#include "gla/head_keepers.cuh"
#include "gla/head_loaders.cuh"
#include "gla/head_publishers.cuh"
#include "gla/head_readers.cuh"
#include "tile/grid.h"

namespace girih::kernels {

template <typename T, int D, bool Reverse>
__global__ void __launch_bounds__(kHeadReadThreads, 1)
    head_read_kernel(const __grid_constant__ HeadPass pass) {
  extern __shared__ __align__(1024) unsigned char shared[];
  HeadBlock<T, D, Reverse> block(pass, shared);
  if (!block.start()) return;
  block.init_barriers();
  __syncthreads();
  if (block.warp < kLoaders) {
    block.load();
  } else if (block.warp < kFirstKeeper) {
    leave_registers<kPublisherRegisters>();
    if (block.publishes) block.publish();
  } else {
    take_registers<kProductRegisters>();
    if (block.warp < kFirstKeeper + kKeepers<D>) {
      block.keep_state();
    } else {
      block.read();
    }
  }
}

template <typename T, int D, bool Reverse>
cudaError_t launch_head_read(HeadPass pass, cudaStream_t stream) {
  const HeadShape& shape = pass.read.shape;
  const int walkers = pass.cut.decay != nullptr ? state_heads(pass.read) : shape.query_heads;
  const int64_t blocks = pass.cut.count(shape.tokens) * walkers * divide_up(shape.V, kSlab);
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  constexpr int kStage = HeadStage<T, D>::kBytes, kState = HeadState<T, D>::kBytes,
                kPlace = HeadValues<T>::kBytes;
  if (limit < kLeastHeadReadBytes<T, D>) return cudaErrorInvalidConfiguration;
  // One of each, then more of each while shared memory is left: states, stages of q and k, stages of v. There
  // are at least as many stages of v as of q and k.
  int room = limit - kLeastHeadReadBytes<T, D>;
  const auto take = [&](int bytes) {
    if (bytes <= room) return room -= bytes, true;
    return false;
  };
  pass.stages = pass.values = pass.slots = 1;
  if (take(kState)) ++pass.slots;
  while (pass.stages < kMaxStages && take(kStage + kPlace)) ++pass.stages, ++pass.values;
  while (pass.values < kMaxValues && take(kPlace)) ++pass.values;
  while (pass.slots < kMaxSlots && take(kState)) ++pass.slots;
  // Warpgroups that process chunks round-robin need two stages and two states.
  pass.readers = std::min({kReaders<D> / 4, pass.stages, pass.slots});
  return launch_kernel<head_read_kernel<T, D, Reverse>>(pass, blocks, kHeadReadThreads, limit - room, stream);
}

}  // namespace girih::kernels
