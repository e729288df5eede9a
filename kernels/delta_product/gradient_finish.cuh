// The end of gradients, after all slabs: N and dP, their products with keys and queries, and the stores.
#pragma once

#include "delta_product/gradient_block.cuh"

namespace girih::kernels::delta_product {

// Computes N_ij = -beta_i G_i . U_j (j < i) and dP_tj = do_t . U_j with their factors and stores them as
// operands. Computes the term sum_j M_ij G_i . U_j of dbeta_i. A lone warpgroup has its rows of N in
// registers and computes dK += N K at once.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::compute_operands(const Divider& steps,
                                                                               AFragment<kChunkTiles>& left) {
  if (kSpillsDq) spill_accumulator<kThreads>(tile.dq_spill(), dq);
  if (coord.group == Sizes::kQueryGroup && is_query_late) loads.template start_queries<kGroup>(chunk_info);
  // k . dk of the products with states
  if (gated)
    store_warp_rows(tile.finish_sums->state[coord.group], coord.thread_row,
                    dot_rows<T>(dk, rows_of(tile.k, coord.col)));
  // With fewer tokens than steps the second warpgroup has less work.
  if (unit_rows && coord.group == (many_tokens ? 0 : Sizes::kQueryGroup)) {
    store_warp_rows(tile.finish_sums->square[0], coord.thread_row, square_rows<D, T>(rows_of(tile.k, 0)));
  }
  if (coord.group == 0) compute_step_operands<factors>(p, coord, tile, chunk_factors, steps, products, left);
  if (kHasNInRegisters) {
    start_key_product(left, dk);
    fill(do_products, 0.f);
    add_scores<T>(tile.origin, do_products, tile.dout, tile.u);
    wgmma_wait<0>(dk);
    keep_registers(left);
    loads.template wait_queries<kGroup>(chunk_info);
    fence_async_proxy();
    __syncthreads();
  }
  if (coord.group == Sizes::kQueryGroup) {
    if (!kHasNInRegisters) {
      loads.template wait_queries<kGroup>(chunk_info);
      fence_async_proxy();
      group_barrier();
    }
    if (unit_rows && has_tokens) {
      store_warp_rows(tile.finish_sums->square[1], coord.thread_row, square_rows<D, T>(rows_of(tile.q, 0)));
    }
    compute_query_operands<factors>(p, coord, tile, chunk_factors, query_products());
  } else if (!kHasNInRegisters) {
    group_barrier_for_racecheck();
  }
  if (kHasNInRegisters) {
    fill(dq, 0.f);
    start_states<D>(tile.origin, dq, tile.dout, tile.states, coord.col);
  }
  __syncthreads();
  if (kSpillsDq) reload_accumulator<kThreads>(dq, tile.dq_spill());
  if (kHasNInRegisters) wgmma_wait<0>(dq);
}

// Starts sums += left K.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::start_key_product(
    const AFragment<kChunkTiles>& left, Gradient& sums) const {
  wgmma_fence(sums);
  wgmma_start<T>(tile.origin, sums, left, tile.k, coord.col);
  wgmma_commit();
}

// Starts dq_t = r_t S do_t + sum_j dP_tj k_j, dP with its factors; with gates also r_t q_t . S do_t.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::start_dq(AFragment<kChunkTiles>& left) {
  const int n = p.shape.n, thread_row = coord.thread_row;
  if (gated) {
    const float2 log = {
        chunk_factors.element(kDeltaLogDecay, min(thread_row * n, kDeltaChunkRows - 1)),
        chunk_factors.element(kDeltaLogDecay, min((thread_row + 8) * n, kDeltaChunkRows - 1))};
    scale_rows(dq, {exp2_fast(log.x), exp2_fast(log.y)});
    // Memory below the rows of the last tokens belongs to other warps.
    const float2 state = has_tokens ? dot_rows<T>(dq, rows_of(tile.q, coord.col)) : float2{0.f, 0.f};
    store_warp_rows(tile.finish_sums->query[coord.group], thread_row,
                    {tile.factors[thread_row] * state.x, tile.factors[thread_row + 8] * state.y});
  }
  if (kHasScaledDp) scale_rows(dq, {p.shape.scale, p.shape.scale});
  fill(left);
#pragma unroll
  for (int j = 0; j < kChunkTiles; ++j) {
    if (has_tokens && ChunkInfo::has_reads(coord.band, j, n)) {
      tile.blocks(kHasScaledDp ? Tiles::kTokenBlocks : Tiles::kRowBlocks)
          .load(left.at[j], OperandBlocks::token_block_index(many_tokens, coord.band, j));
    }
  }
  start_key_product(left, dq);
}

// dk_j += sum_t dP_tj q_t for 16 Bands tokens, dP with its factors; waits for dq, whose A fragment is `left`.
template <typename T, int D, bool OneSlab, Factors factors>
template <int Bands>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::add_queries(
    const AFragment<kChunkTiles>& left) {
  AFragment<Bands> dp_transposed;
  fill(dp_transposed);
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
    if (ChunkInfo::has_reads(b, coord.band, p.shape.n)) {
      tile.blocks(Tiles::kTokenBlocks)
          .load_transposed(dp_transposed.at[b], OperandBlocks::token_block_index(many_tokens, b, coord.band));
    }
  }
  wgmma_fence(dk);
  wgmma_start<T>(tile.origin, dk, dp_transposed, tile.q, coord.col);
  wgmma_commit();
  wgmma_wait<0>(dq, dk);
  keep_registers(left);
  keep_registers(dp_transposed);
}

// dk_j += sum_i (N_ij + N_ji) k_i, N with its factors. On a diagonal block N and N^T have disjoint nonzero
// elements, so they are combined by a bitwise or.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::add_keys(AFragment<kChunkTiles>& left) {
  fill(left);
#pragma unroll
  for (int j = 0; j < kChunkTiles; ++j) {
    uint32_t above[4] = {0, 0, 0, 0};
    if (!kHasNInRegisters && j <= coord.band)
      tile.blocks(kHasNoFactors ? Tiles::kStepCols : Tiles::kStepRows)
          .load(left.at[j], inverse_block_index(coord.band, j));
    if (j >= coord.band)
      tile.blocks(Tiles::kStepCols).load_transposed(above, inverse_block_index(j, coord.band));
#pragma unroll
    for (int i = 0; i < 4; ++i) left.at[j][i] |= above[i];
  }
  start_key_product(left, dk);
  wgmma_wait<0>(dk);
  keep_registers(left);
}

// With normalised q and k: multiplies dq and dk by rho and subtracts the components parallel to q and k.
// rho_j is applied to the fp32 accumulator of dk_j: 1000 times a sum may exceed the range of fp16.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::finish_lengths() {
  const int thread_row = coord.thread_row;
  FinishSums<D>& finish_sums = *tile.finish_sums;
  float2 inverse_length_k, inverse_length_q;
  if (unit_rows) {
    inverse_length_k =
        inverse_length({finish_sums.square[0][thread_row], finish_sums.square[0][thread_row + 8]});
    inverse_length_q =
        inverse_length({finish_sums.square[1][thread_row], finish_sums.square[1][thread_row + 8]});
    scale_rows(dq, {p.shape.scale * inverse_length_q.x, p.shape.scale * inverse_length_q.y});
    scale_rows(dk, inverse_length_k);
    store_warp_rows(finish_sums.projection[0][coord.group], thread_row,
                    dot_rows<T>(dk, rows_of(tile.k, coord.col)));
    if (has_tokens) {
      store_warp_rows(finish_sums.projection[1][coord.group], thread_row,
                      dot_rows<T>(dq, rows_of(tile.q, coord.col)));
    }
  } else if (!kHasScaledDp) {
    scale_rows(dq, {p.shape.scale, p.shape.scale});
  }
  __syncthreads();
  if (unit_rows) {
    subtract_projection<T>(dk, rows_of(tile.k, coord.col), sum_groups(finish_sums.projection[0], thread_row),
                           inverse_length_k);
    if (has_tokens)
      subtract_projection<T>(dq, rows_of(tile.q, coord.col),
                             sum_groups(finish_sums.projection[1], thread_row), inverse_length_q);
  }
}

// Stores dq, dk, dbeta_i = G_i . E_i (partial sums of the warps, complete since the last barrier), and dg.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::store() const {
  const int64_t batch = chunk_info.range.sequence.batch, first_row = chunk_info.range.start * p.shape.n;
  const int row = coord.row, cols = p.shape.D - coord.col;
  store_rows_by(rows_of(tile.q, coord.col), dq,
                at<T>(p.dq, batch, chunk_info.range.start + row, chunk_info.output_head, coord.col),
                p.dq.stride[1], chunk_info.range.length - row, cols);
  if (p.dk.dtype == DType::f32) {
    store_floats(dk, at<float>(p.dk, batch, first_row, chunk_info.output_head, coord.col), p.dk.stride[1],
                 row, chunk_info.rows, cols);
  } else {
    store_rows_by(rows_of(tile.k, coord.col), dk,
                  at<T>(p.dk, batch, first_row + row, chunk_info.output_head, coord.col), p.dk.stride[1],
                  chunk_info.rows - row, cols);
  }

  const int thread = static_cast<int>(threadIdx.x);
  if (chunk_info.is_first_head && thread < chunk_info.rows) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i <= Sizes::kValueGroups; ++i) sum += tile.sums->beta[i][thread];
    if (dz_holds_dv<T>(p, prepared)) sum = divide_fast(sum, chunk_factors.element(kDeltaBeta, thread));
    static_cast<float*>(p.dbeta.data)[offset_of(p.dbeta, batch, first_row + thread, chunk_info.head)] = sum;
  }
  if (gated && warp == kThreads / 32 - 1)
    store_gate_gradients<D>(p, chunk_info, *tile.sums, *tile.finish_sums, chunk_factors);
}

}  // namespace girih::kernels::delta_product
