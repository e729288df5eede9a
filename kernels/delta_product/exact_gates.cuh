// The gradients of the gates: what a block of the exact gradients sums beside its products.
//
// What a gate scales is never a difference of sums, of which little would be left behind closed gates: of the
// pairs  E_ij A_ij (x_i . k_j)  those that it lies between are added up, and of F and u dS the rows on its
// side.
#pragma once

#include "delta_product/exact_piece.cuh"

namespace girih::kernels::delta_product::by_piece {

// What is added to: the others are written.
template <bool Gated>
__device__ inline void PieceGradients<Gated>::clear_gates() const {
  for (int i = thread; i < kWarps * kTile; i += kThreads) {
    if (i < kTile) gates.steps[i] = gates.queries[0][i] = gates.queries[1][i] = 0.f;
    gates.pairs[i / kTile][i % kTile] = 0.f;
  }
}

// e^{gates through a token}, e^{those after it}, and E.
template <bool Gated>
__device__ inline void PieceGradients<Gated>::sum_gates() const {
  // Not differences of sums: long sums have no digits left for short ones.
  const float(&gate)[kTile] = gates.gate;
  const int j = thread % kTile, part = thread / kTile;
  if (part == 0) {
    float through = 0.f;
    for (int t = 0; t <= j; ++t) through += gate[t];
    gates.through[j] = expf(through);
  } else if (part == 1) {
    float after = 0.f;
    for (int t = space.tokens - 1; t > j; --t) after += gate[t];
    gates.after[j] = expf(after);
  }
  // E of rows: row i of sixteen, column j, zero where j's token is later.
  if (j / kBlock > part) return;
  float* const to = decays + (part * (part + 1) / 2 + j / kBlock) * kBlock * kBlock + j % kBlock;
  float sum = 0.f;
  int token = space.token[j];
  for (int i = 0; i < kBlock; ++i) {
    const int last = space.token[part * kBlock + i];
    while (token < last) sum += gate[++token];
    to[i * kBlock] = token > last ? 0.f : expf(sum);
  }
}

// dS as it is at the warp's rows, e^{L_C - L} u dS, and what the gates after them scale of it.
template <bool Gated>
__device__ inline void PieceGradients<Gated>::sum_far_writes(Sums<4>& dk) const {
  const int row = from + lane_row();
  scale_rows(dk, {gates.after[space.token[row]], gates.after[space.token[row + 8]]});
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float far = 0.f;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      far = add_dot(far, four(dk, i, m), four(tile(kKeys), from + 8 * i, kHalf * team + kBlock * m));
    }
    far = sum_over_row(far);
    if (lane_col() == 0) gates.writes[team][row + 8 * i] = far;
  }
}

// What the gates up to the warp's rows scale of S.
template <bool Gated>
__device__ inline void PieceGradients<Gated>::sum_far(const Sums<8>& sums) const {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float far = 0.f;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      far = add_dot(far, four(sums, i, m), four(tile(kReaderRows + team), from + 8 * i, kBlock * m));
    }
    far = sum_over_row(far);
    if (lane_col() == 0) (steps() ? gates.steps : gates.queries[team])[from + lane_row() + 8 * i] += far;
  }
}

// Of pairs' shares of the gates between their rows, E_ij A_ij (x_i . k_j), the sums over j before a row and
// over those i, of the warp's, that are there or later.
template <bool Gated>
__device__ inline void PieceGradients<Gated>::sum_pairs() const {
  const int reads = blocks();
  Sums<8> pairs;
  fill(pairs, 0.f);
#pragma unroll 1
  for (int c = 0; c < kTile; c += kBlock) {
    SplitBlock a;
    a.load(tile(kReaderRows + team), from, c);
    add_scores(pairs, a, tile(kKeys), c, reads);
  }
  float before[2] = {0.f, 0.f};
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    if (m >= reads) break;
    const int column = kBlock * m + lane_four();
    Pack<4> sums = zeros<4>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Pack<4> x = four(pairs, i, m);
      const Pack<4> weight = four(tile(kReads + team), from + 8 * i, kBlock * m);
#pragma unroll
      for (int e = 0; e < 4; ++e) x.at[e] *= weight.at[e];
      // Of the lanes before, and of all four.
      float all = x.at[0] + x.at[1] + (x.at[2] + x.at[3]);
      float other = __shfl_xor_sync(~0u, all, 1);
      float sum = lane() & 1 ? other : 0.f;
      all += other;
      other = __shfl_xor_sync(~0u, all, 2);
      if (lane() & 2) sum += other;
      all += other;
      sum += before[i];
      before[i] += all;
      const int row = from + lane_row() + 8 * i, last = steps() ? row : row * n;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (column + e <= last) sums.at[e] += sum;
        sum += x.at[e];
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.at[e] = sum_over_col(sums.at[e]);
    if (lane_row() == 0) {
#pragma unroll
      for (int e = 0; e < 4; ++e) gates.pairs[thread / 32][column + e] += sums.at[e];
    }
  }
}

// dg of the piece's tokens, of these columns of D.
template <bool Gated>
__device__ inline void PieceGradients<Gated>::put_gates() const {
  __syncthreads();
  const int t = thread / kTokenLanes, part = thread % kTokenLanes;
  float dg = 0.f;
  for (int i = t + part; i < rows_of(false); i += kTokenLanes)
    dg += gates.queries[0][i] + gates.queries[1][i];
  for (int i = t * n + part; i < rows_of(true); i += kTokenLanes) dg += gates.steps[i];
  for (int j = part; j < t * n && j < rows_of(true); j += kTokenLanes) {
    dg += gates.writes[0][j] + gates.writes[1][j];
  }
  if (t < space.tokens) {
    for (int w = part; w < kWarps; w += kTokenLanes) dg += gates.pairs[w][t * n];
  }
  dg += __shfl_xor_sync(~0u, dg, 1);
  dg += __shfl_xor_sync(~0u, dg, 2);
  if (part == 0 && t < space.tokens) {
    float whole = 0.f;
    for (int w = 0; w < kWarps; ++w) whole += gates.parts[w];
    const Tokens& all = shape.pieces.tokens;
    p.dg[((slab * all.batch + space.batch) * all.tokens + space.start + t) * shape.heads + space.head] =
        fmaf(gates.through[space.tokens - 1], whole, dg);
  }
}

}  // namespace girih::kernels::delta_product::by_piece
