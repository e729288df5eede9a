// The kernel of gated_scan. A chunk has C = 64 tokens; L are the running sums of its gates:
//
//     forward   S <- S Diag(e^{L_C}) + x^T (s * e^{L_C - L})      states[c] = S before chunk c
//     reverse   S <- S Diag(e^{L_C}) + x^T s, s = y * e^{L}       states[c] = S before the update of chunk c,
//               or (S + x^T s) Diag(e^{L_C}), s = y * e^{L - L_C} the last chunk first
//
// Exponents are at most zero, except in y * e^{L - L_C}, which factored_limit bounds (and factor_shift
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
__global__ void __launch_bounds__(kMaxWarpgroups* kWarpgroup, 1) scan(const __grid_constant__ ScanPass pass) {
  using Block = ScanBlock<T, Slabs, Slots, Reverse>;
  using Stage = typename Block::Stage;
  extern __shared__ __align__(128) char shared[];
  const GatedScan& p = pass.scan;
  Block block(pass, shared);
  if (!block.find()) return;
  const Walk<Reverse>& walk = block.walk;
  const int warpgroup = block.warpgroup;

  char* const ring = shared + kCarriedBytes<Slabs, Slots> + warpgroup * pass.stages * Stage::kBytes;
  ScanLoads<T, Slabs, Slots, Reverse> loads(pass, walk, block.slab, block.head, block.col, block.cols,
                                            warpgroup, block.thread);
  for (int i = 0; i < pass.stages; ++i) loads.start(Stage{ring + i * Stage::kBytes});

  if (lane() == 0) init_barrier(&block.carried.turns[warpgroup][block.warp], 32);
  if (block.thread < Slots) block.carried.gates[warpgroup][block.thread] = 0.f;
  block.begin_state();
  block.find_states();
#pragma unroll
  for (int i = 0; i < Slabs; ++i) fill(block.u[i], 0.f);
  __syncthreads();

  int slot = 0, member = 0;
  unsigned parity = 0;
  for (int turn = warpgroup; turn < walk.chunks;) {
    const Stage stage{ring + slot * Stage::kBytes};
    bool after_it = false;  // U is decayed with the chunk
    if constexpr (Reverse) {
      after_it = p.factored[(block.first_chunk + walk.chunk_of(turn)) * p.heads + block.head];
    }
    if (pass.stages == 2) {
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    block.meet();
    block.weigh_chunk(stage, loads.has_s(), member == 0);
    block.meet();
    block.add_chunk(stage);
    if (++member == p.group) {
      typename Block::Rounded before;
      block.carry(stage, turn, after_it, parity, before);
      if (!block.alone) {
        block.meet();  // all four warps have read x
        block.publish(stage, turn, before);
      }
      member = 0;
      turn += pass.warpgroups;
    }
    block.meet();
    loads.start(stage);
    slot = slot + 1 == pass.stages ? 0 : slot + 1;
  }
  wait_copies<0>();
  block.end();
}

}  // namespace girih::kernels::gsa
