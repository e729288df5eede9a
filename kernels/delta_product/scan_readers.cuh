// The readers of the scan: a warpgroup that makes the output of what the chain leaves,
//
//     o_t = scale rho_t e^{L_t} S^T q_t + sum_j P_tj U_j
//
// transposed, warp w with the same 16 columns as in the chain. Products whose left factor lies in registers
// hold their warps until the tensor cores take them: in the chain's warps these two were a third of its time.
#pragma once

#include "delta_product/scan_space.cuh"

namespace girih::kernels::delta_product {

constexpr int kReaderBarrier = 1;

template <typename T, int D, int Rows>
__device__ inline void run_readers(const ScanPass& pass, const Part& part, const ScanSpace<T, D, Rows>& space,
                                   int warp) {
  constexpr bool kWhole = D < 256;  // all of S in registers
  constexpr int kSlabs = D / 64;
  const DeltaScan& p = pass.scan;
  const int tokens = delta_chunk(p.shape.n), group = p.shape.query_heads / p.shape.heads,
            cols = p.shape.V - part.col;
  ScanBarriers& barriers = space.barriers();
  Turn slot, query_turn;
  // All four have read what they share, or written it.
  const auto meet = [] { barrier_wait(kReaderBarrier, 32 * ScanRoles<Rows>::kReaders); };
#pragma unroll 1
  for (int c = 0; c < part.chunks; ++c) {
    Operand<4> s[kWhole ? kSlabs : 1];
    const auto load_slab = [&](int i) -> Operand<4>& {
      Operand<4>& a = s[kWhole ? i : 0];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_block(a.at[k], space.state(slot.place), 16 * warp, 64 * i + 16 * k);
      }
      return a;
    };
    wait(&barriers.state[slot.place], slot.parity);
#pragma unroll
    for (int i = 0; i < kSlabs; ++i) {
      if (kWhole) load_slab(i);
    }
    Operand<kTilesDown> u;
#pragma unroll 1
    for (int member = 0; member < group; ++member) {
      const QueryStage<T, D, Rows> query = space.query(query_turn.place);
      wait(&barriers.scored[query_turn.place], query_turn.parity);
      Sums<Rows / 8> o;
      fence_products();
#pragma unroll
      for (int i = 0; i < kSlabs; ++i) {
        const Operand<4>& a = kWhole ? s[kWhole ? i : 0] : load_slab(i);
        if (!kWhole) fence_products();
        if (i == 0) start_product_transposed<T, false>(o, a, query.q(), 0);
        if (i > 0) start_product_transposed<T, true>(o, a, query.q(), 64 * i);
        if (!kWhole || i + 1 == kSlabs) {
          commit_products();
          wait_products<0>(o);
        }
      }
      const float* const factors = query.factors() + lane_col();
      scale_columns(o, [&](int n) { return *reinterpret_cast<const float2*>(factors + 8 * n); });
      if (member == 0) {
        wait(&barriers.update[slot.place], slot.parity);
#pragma unroll
        for (int k = 0; k < kTilesDown; ++k) load_block(u.at[k], space.update(slot.place), 16 * warp, 16 * k);
      }
      if (kWhole ? member == 0 : member + 1 == group) arrive(&barriers.read[slot.place]);
      fence_products(o);
      start_product_transposed<T>(o, u, query.p());
      commit_products();
      wait_products<0>(o);
      Operand<Rows / 16> out;
      round_to<T>(out, o);
      meet();
      leave_transposed(query.o(), out, warp);
      meet();
      T* const to = at<T>(p.o, part.piece.sequence.batch, part.piece.start + c * tokens,
                          static_cast<int64_t>(part.head) * group + member, part.col);
      store_rows<ScanRoles<Rows>::kReaders>(query.o(), to, p.o.stride[1], tokens_in(part, tokens, c), cols,
                                            warp);
      arrive(&barriers.query_empty[query_turn.place]);
      query_turn.next(pass.queries);
    }
    slot.next(pass.slots);
  }
}

}  // namespace girih::kernels::delta_product
