// The kernel of gated_scan. A chunk has C = 64 tokens; L are the running sums of its gates:
//
//     forward   S <- S Diag(e^{L_C}) + x^T (s * e^{L_C - L})      states[c] = S before chunk c
//     reverse   S <- S Diag(e^{L_C}) + x^T s, s = y * e^{L}       states[c] = S before the update of chunk c,
//               or (S + x^T s) Diag(e^{L_C}), s = y * e^{L - L_C} the last chunk first
//
// Exponents are at most zero, except in y * e^{L - L_C}, which max_factored_log2 bounds (and factor_shift
// scales). Values that underflow do not contribute to the state.
//
// A block has Slabs x 64 rows and Slots columns of the state of one head, for all chunks of a sequence or
// segment. U = x^T s~ (s~ the weighted s) does not depend on S. So the warpgroups of the block process chunks
// round-robin, and only S <- S e^{L_C} + U is sequential. S is in shared memory in fp32. Thread i of every
// warpgroup has the same elements of S, and an mbarrier for each warp passes them to the next warpgroup.
// Every warpgroup has its own ring of stages, filled by cp.async. In a warpgroup, a warp has the gates and s~
// of a quarter of the columns for all 64 tokens, so that the sums of the gates stay within the warp, and then
// 16 rows of each slab of U.
#pragma once

#include "gsa/scan_block.cuh"

namespace girih::kernels::gsa {

template <typename T, int Slabs, int Slots, bool Reverse>
__global__ void __launch_bounds__(kMaxWarpgroups* kWarpgroupThreads, 1)
    scan(const __grid_constant__ ScanParams params) {
  using Block = ScanBlock<T, Slabs, Slots, Reverse>;
  using Stage = typename Block::Stage;
  GIRIH_DYNAMIC_SHARED(char, shared, 128);
  const GatedScan& p = params.scan;
  Block block(params, shared);
  if (!block.init()) return;
  const ChunkRange<Reverse>& range = block.range;
  const int warpgroup = block.warpgroup;

  char* const ring = shared + kSharedStateBytes<Slabs, Slots> + warpgroup * params.stages * Stage::kBytes;
  ScanLoads<T, Slabs, Slots, Reverse> loads(params, range, block.slab, block.head, block.col, block.cols,
                                            warpgroup, block.thread);
  for (int i = 0; i < params.stages; ++i) loads.start(Stage{ring + i * Stage::kBytes});

  if (lane() == 0) init_barrier(&block.shared_state.state_full[warpgroup][block.warp], 32);
  if (block.thread < Slots) block.shared_state.gates[warpgroup][block.thread] = 0.f;
  block.load_initial_state();
  block.init_state_pointers();
#pragma unroll
  for (int i = 0; i < Slabs; ++i) fill(block.u[i], 0.f);
  __syncthreads();

  int stage_index = 0, query = 0;
  unsigned phase = 0;
  for (int step = warpgroup; step < range.chunks;) {
    const Stage stage{ring + stage_index * Stage::kBytes};
    bool is_update_decayed = false;  // U is decayed with the chunk
    if constexpr (Reverse) {
      is_update_decayed = p.is_factored[(block.first_chunk + range.chunk_index(step)) * p.heads + block.head];
    }
    if (params.stages == 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    block.sync_warpgroup();
    block.weight_chunk(stage, loads.has_s(), query == 0);
    block.sync_warpgroup();
    block.accumulate_update(stage);
    if (++query == p.group) {
      typename Block::Rounded before;
      block.update_state(stage, step, is_update_decayed, phase, before);
      if (!block.is_local_scan) {
        block.sync_warpgroup();  // all four warps have read x
        block.store_state(stage, step, before);
      }
      query = 0;
      step += params.warpgroups;
    }
    block.sync_warpgroup();
    loads.start(stage);
    stage_index = stage_index + 1 == params.stages ? 0 : stage_index + 1;
  }
  wait_copies<0>();
  block.store_final_state();
}

}  // namespace girih::kernels::gsa
