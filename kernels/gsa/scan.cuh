// The kernel of gated_scan. A chunk has C = 64 tokens, L_t is the sum of its gates through token t, and S
// [width, M] is the state. states[c] = S before the update of chunk c; in reverse, chunks run from the last
// to the first:
//
//     forward                  S <- S Diag(e^{L_C}) + x^T s~      s~ = s * e^{L_C - L}
//     reverse, not factored    S <- S Diag(e^{L_C}) + x^T s       s = y * e^L
//     reverse, factored        S <- (S + x^T s) Diag(e^{L_C})     s = y * e^{L - L_C}
//
// In reverse y are the weights of the reads. gsa_dq (gla_dq) has computed s from y, and has decided for every
// chunk whether it is factored (GateGradientTerms in gsa.h).
//
// For gates <= 0, exponents are at most 0, except L - L_C: a chunk is factored only if L - L_C is at most
// max_factored_log2 in powers of two (chunk_gates.cuh). In fp16 the factored s also contains 2^-factor_shift.
// Tokens whose s~ (in reverse s) underflows do not contribute to the state.
//
// A slab is 64 rows of S. A block has `Slabs` slabs and `Slots` columns (a tile of the M slots) of the state
// of one head, for all chunks of a sequence or segment. U = x^T s~ (in reverse x^T s) does not depend on S.
// So the warpgroups of the block process chunks round-robin, and only the update of S is sequential. S is in
// shared memory in fp32. Thread i of every warpgroup has the same elements of S, and an mbarrier for each
// warp passes them to the next warpgroup (SharedState::state_full). Every warpgroup has its own ring of
// stages, filled by cp.async.
//
// A warpgroup processes a chunk in two phases. In the first phase a warp scales a quarter of the columns of s
// for all 64 tokens, so that the sums of the gates stay within the warp. In the second phase a warp computes
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
  const GatedScan& p = params.problem;
  Block block(params, shared);
  if (!block.init()) return;
  const ChunkRange<Reverse>& range = block.range;
  const int warpgroup = block.warpgroup;

  char* const ring =
      shared + kSharedStateBytes<Slabs, Slots> + warpgroup * params.stages_per_warpgroup * Stage::kBytes;
  ScanLoads<T, Slabs, Slots, Reverse> loads(params, range, block.slab, block.head, block.first_col,
                                            block.cols, warpgroup, block.thread);
  for (int i = 0; i < params.stages_per_warpgroup; ++i) loads.start(Stage{ring + i * Stage::kBytes});

  // 32 arrivals: every lane releases the elements of S that it has written.
  if (lane() == 0) init_barrier(&block.shared_state.state_full[warpgroup][block.warp], 32);
  if (block.thread < Slots) block.shared_state.gate_sums[warpgroup][block.thread] = 0.f;
  block.load_initial_state();
  block.init_state_packs();
#pragma unroll
  for (int i = 0; i < Slabs; ++i) fill(block.u[i], 0.f);
  __syncthreads();

  // x and s of one query head are one stage. If a memory head has several query heads, U is summed over these
  // heads before S is updated.
  int stage_index = 0, query_index = 0;
  unsigned phase = 0;
  for (int step = warpgroup; step < range.chunks;) {
    const Stage stage{ring + stage_index * Stage::kBytes};
    bool is_factored = false;
    if constexpr (Reverse) {
      is_factored = p.is_factored[(block.first_chunk + range.chunk_index(step)) * p.heads + block.head];
    }
    if (params.stages_per_warpgroup == 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    block.sync_warpgroup();
    block.apply_chunk_gates(stage, loads.has_s(), query_index == 0);
    block.sync_warpgroup();
    block.accumulate_update(stage);
    if (++query_index == p.group) {
      typename Block::PackedState old_state;
      block.update_state(stage, step, is_factored, phase, old_state);
      if (!block.is_local_scan) {
        block.sync_warpgroup();  // all four warps have read x
        block.store_state(stage, step, old_state);
      }
      query_index = 0;
      step += params.warpgroups;
    }
    block.sync_warpgroup();
    loads.start(stage);
    stage_index = stage_index + 1 == params.stages_per_warpgroup ? 0 : stage_index + 1;
  }
  wait_copies<0>();
  block.store_final_state();
}

}  // namespace girih::kernels::gsa
