// The scan's kernel. A chunk of C = 64 tokens, L its gates' running sums:
//
//     forward   S <- S Diag(e^{L_C}) + x^T (s * e^{L_C - L})      states[c] = S before chunk c
//     reverse   S <- S Diag(e^{L_C}) + x^T s, s = y * e^{L}       states[c] = S before it gets chunk c, the
//               or (S + x^T s) Diag(e^{L_C}), s = y * e^{L - L_C} last chunk first
//
// No exponent is above zero but in y * e^{L - L_C}, which factored_limit bounds (and factor_shift moves);
// what underflows is gone from the state anyway.
//
// A block has Slabs x 64 rows and Slots columns of one head's state, for all chunks of a sequence or a
// segment of one. U = x^T s~ (s~ the weighted s) does not need S, so the block's warpgroups take chunks in
// turn, and S <- S e^{L_C} + U alone goes from one to the next. S lies in shared memory in fp32; thread i of
// every warpgroup has the same elements of it, and a barrier for every warp hands them over. Every warpgroup
// has its own ring of stages, filled by cp.async. In a warpgroup every warp has the gates and s~ of a quarter
// of the columns, all 64 tokens of them, so that their sums stay within a warp, and then 16 rows a slab of U.
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
    bool after_it = false;  // U takes part in the chunk's decay
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
        block.meet();  // all four warps are done with x
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
