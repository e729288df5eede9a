// The end of gradients, after all slabs: N and dP, their products with keys and queries, and the stores.
#pragma once

#include "delta_product/gradient_block.cuh"

namespace girih::kernels::delta_product {

// N_ij = -beta_i G_i . U_j (j < i) and dP_tj = do_t . U_j with their factors, stored as operands; the term
// sum_j M_ij G_i . U_j of dbeta_i. A lone warpgroup has its rows of N in registers and computes dK += N K at
// once.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::weigh(const Divider& steps,
                                                                    Operand<kTilesDown>& left) {
  if (kAside) put_aside<kThreads>(tile.aside(), dq);
  if (place.group == Sizes::kQueries && late) loads.template start_queries<kGroup>(here);
  // k . dk of the products with states
  if (gated)
    put_rows(tile.later->state[place.group], place.mine, dot_rows<T>(dk, rows_of(tile.k, place.col)));
  // With fewer tokens than steps the second warpgroup has less work.
  if (unit_rows && place.group == (many_tokens ? 0 : Sizes::kQueries)) {
    put_rows(tile.later->square[0], place.mine, square_rows<D, T>(rows_of(tile.k, 0)));
  }
  if (place.group == 0) weigh_steps<factors>(p, place, tile, vectors, steps, of_steps, left);
  if (kOwn) {
    start_left(left, dk);
    fill(both, 0.f);
    add_scores<T>(tile.origin, both, tile.dout, tile.u);
    wait_products<0>(dk);
    keep(left);
    loads.template wait_queries<kGroup>(here);
    fence_tiles();
    __syncthreads();
  }
  if (place.group == Sizes::kQueries) {
    if (!kOwn) {
      loads.template wait_queries<kGroup>(here);
      fence_tiles();
      group_barrier();
    }
    if (unit_rows && has_tokens) {
      put_rows(tile.later->square[1], place.mine, square_rows<D, T>(rows_of(tile.q, 0)));
    }
    weigh_queries<factors>(p, place, tile, vectors, of_queries());
  } else if (!kOwn) {
    group_barrier_for_racecheck();
  }
  if (kOwn) {
    fill(dq, 0.f);
    start_states<D>(tile.origin, dq, tile.dout, tile.states, place.col);
  }
  __syncthreads();
  if (kAside) take_back<kThreads>(dq, tile.aside());
  if (kOwn) wait_products<0>(dq);
}

// Starts sums += left K.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::start_left(const Operand<kTilesDown>& left,
                                                                         Gradient& sums) const {
  fence_products(sums);
  start_product<T>(tile.origin, sums, left, tile.k, place.col);
  commit_products();
}

// Starts dq_t = r_t S do_t + sum_j dP_tj k_j, dP with its factors; with gates also r_t q_t . S do_t.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::start_dq(Operand<kTilesDown>& left) {
  const int n = p.shape.n, mine = place.mine;
  if (gated) {
    const float2 log = {vectors.element(kDeltaLog, min(mine * n, kDeltaRows - 1)),
                        vectors.element(kDeltaLog, min((mine + 8) * n, kDeltaRows - 1))};
    scale_rows(dq, {exp2_fast(log.x), exp2_fast(log.y)});
    // Memory below the rows of the last tokens belongs to other warps.
    const float2 state = has_tokens ? dot_rows<T>(dq, rows_of(tile.q, place.col)) : float2{0.f, 0.f};
    put_rows(tile.later->query[place.group], mine,
             {tile.factors[mine] * state.x, tile.factors[mine + 8] * state.y});
  }
  if (kScaled) scale_rows(dq, {p.shape.scale, p.shape.scale});
  fill(left);
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
    if (has_tokens && Here::follow(place.band, j, n)) {
      tile.blocks(kScaled ? Tiles::kOfTokens : Tiles::kOfRows)
          .load(left.at[j], Blocks::of_tokens(many_tokens, place.band, j));
    }
  }
  start_left(left, dq);
}

// dk_j += sum_t dP_tj q_t for 16 Bands tokens, dP with its factors; waits for dq, whose A fragment is `left`.
template <typename T, int D, bool OneSlab, Factors factors>
template <int Bands>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::add_queries(const Operand<kTilesDown>& left) {
  Operand<Bands> of_q;
  fill(of_q);
#pragma unroll
  for (int b = 0; b < Bands; ++b) {
    if (Here::follow(b, place.band, p.shape.n)) {
      tile.blocks(Tiles::kOfTokens)
          .load_transposed(of_q.at[b], Blocks::of_tokens(many_tokens, b, place.band));
    }
  }
  fence_products(dk);
  start_product<T>(tile.origin, dk, of_q, tile.q, place.col);
  commit_products();
  wait_products<0>(dq, dk);
  keep(left);
  keep(of_q);
}

// dk_j += sum_i (N_ij + N_ji) k_i, N with its factors. On a diagonal block N and N^T have disjoint nonzero
// elements, so they are combined by a bitwise or.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::add_keys(Operand<kTilesDown>& left) {
  fill(left);
#pragma unroll
  for (int j = 0; j < kTilesDown; ++j) {
    uint32_t above[4] = {0, 0, 0, 0};
    if (!kOwn && j <= place.band)
      tile.blocks(kDirect ? Tiles::kStepCols : Tiles::kStepRows).load(left.at[j], block_of(place.band, j));
    if (j >= place.band) tile.blocks(Tiles::kStepCols).load_transposed(above, block_of(j, place.band));
#pragma unroll
    for (int i = 0; i < 4; ++i) left.at[j][i] |= above[i];
  }
  start_left(left, dk);
  wait_products<0>(dk);
  keep(left);
}

// With normalised q and k: multiplies dq and dk by rho and subtracts the components parallel to q and k.
// rho_j is applied to the fp32 accumulator of dk_j: 1000 times a sum may exceed the range of fp16.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::finish_lengths() {
  const int mine = place.mine;
  LaterSums<D>& later = *tile.later;
  float2 of_key, of_q;
  if (unit_rows) {
    of_key = inverse_length({later.square[0][mine], later.square[0][mine + 8]});
    of_q = inverse_length({later.square[1][mine], later.square[1][mine + 8]});
    scale_rows(dq, {p.shape.scale * of_q.x, p.shape.scale * of_q.y});
    scale_rows(dk, of_key);
    put_rows(later.along[0][place.group], mine, dot_rows<T>(dk, rows_of(tile.k, place.col)));
    if (has_tokens) {
      put_rows(later.along[1][place.group], mine, dot_rows<T>(dq, rows_of(tile.q, place.col)));
    }
  } else if (!kScaled) {
    scale_rows(dq, {p.shape.scale, p.shape.scale});
  }
  __syncthreads();
  if (unit_rows) {
    take_along<T>(dk, rows_of(tile.k, place.col), whole(later.along[0], mine), of_key);
    if (has_tokens) take_along<T>(dq, rows_of(tile.q, place.col), whole(later.along[1], mine), of_q);
  }
}

// Stores dq, dk, dbeta_i = G_i . E_i (partial sums of the warps, complete since the last barrier), and dg.
template <typename T, int D, bool OneSlab, Factors factors>
__device__ inline void GradientBlock<T, D, OneSlab, factors>::put() const {
  const int64_t batch = here.piece.sequence.batch, first_row = here.piece.start * p.shape.n;
  const int row = place.row, cols = p.shape.D - place.col;
  store_rows_by(rows_of(tile.q, place.col), dq,
                at<T>(p.dq, batch, here.piece.start + row, here.query_head, place.col), p.dq.stride[1],
                here.piece.length - row, cols);
  if (p.dk.dtype == DType::f32) {
    store_floats(dk, at<float>(p.dk, batch, first_row, here.query_head, place.col), p.dk.stride[1], row,
                 here.rows, cols);
  } else {
    store_rows_by(rows_of(tile.k, place.col), dk,
                  at<T>(p.dk, batch, first_row + row, here.query_head, place.col), p.dk.stride[1],
                  here.rows - row, cols);
  }

  const int thread = static_cast<int>(threadIdx.x);
  if (here.first && thread < here.rows) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i <= Sizes::kParts; ++i) sum += tile.sums->beta[i][thread];
    if (divides<T>(p, prepared)) sum = divide_fast(sum, vectors.element(kDeltaBeta, thread));
    static_cast<float*>(p.dbeta.data)[offset_of(p.dbeta, batch, first_row + thread, here.head)] = sum;
  }
  if (gated && warp == kThreads / 32 - 1) put_gate_gradients<D>(p, here, *tile.sums, *tile.later, vectors);
}

}  // namespace girih::kernels::delta_product
