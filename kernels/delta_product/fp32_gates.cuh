// The gradients of the gates in the fp32 gradients.
//
// A gradient is never a difference of sums, which would lose its digits behind closed gates: the sums contain
// exactly the pairs E_ij A_ij (x_i . k_j) that the gate lies between, and the rows of F and u dS on its side.
#pragma once

#include "delta_product/fp32_gradient_block.cuh"

namespace girih::kernels::delta_product::fp32_gradients {

// Clears the accumulated sums; all other members are overwritten.
template <bool Gated>
__device__ inline void SegmentGradients<Gated>::clear_gates() const {
  for (int i = thread; i < kWarps * kTile; i += kThreads) {
    if (i < kTile) gates.steps[i] = gates.queries[0][i] = gates.queries[1][i] = 0.f;
    gates.pairs[i / kTile][i % kTile] = 0.f;
  }
}

// e^{sum of gates through a token}, e^{sum of gates after it}, and E.
template <bool Gated>
__device__ inline void SegmentGradients<Gated>::sum_gates() const {
  // Not differences of prefix sums: short sums lose their digits in long ones.
  const float(&gate)[kTile] = gates.gate;
  const int j = thread % kTile, part = thread / kTile;
  if (part == 0) {
    float through = 0.f;
    for (int t = 0; t <= j; ++t) through += gate[t];
    gates.decay_from_block_start[j] = expf(through);
  } else if (part == 1) {
    float after = 0.f;
    for (int t = segment_info.tokens - 1; t > j; --t) after += gate[t];
    gates.decay_to_block_end[j] = expf(after);
  }
  // E of rows: row i of sixteen, column j; zero if the token of j is later.
  if (j / kBlock > part) return;
  float* const to = decays + (part * (part + 1) / 2 + j / kBlock) * kBlock * kBlock + j % kBlock;
  float sum = 0.f;
  int token = segment_info.token[j];
  for (int i = 0; i < kBlock; ++i) {
    const int last = segment_info.token[part * kBlock + i];
    while (token < last) sum += gate[++token];
    to[i * kBlock] = token > last ? 0.f : expf(sum);
  }
}

// dk *= e^{L_C - L}, which makes it the gradient at the warp's rows; sums its product with k for the gates
// after each row.
template <bool Gated>
__device__ inline void SegmentGradients<Gated>::sum_state_writes(Accumulator<4>& dk) const {
  const int row = from + lane_row();
  scale_rows(dk, {gates.decay_to_block_end[segment_info.token[row]],
                  gates.decay_to_block_end[segment_info.token[row + 8]]});
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float state_term = 0.f;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      state_term =
          add_dot(state_term, four(dk, i, m), four(tile(kKeys), from + 8 * i, kHalf * team + kBlock * m));
    }
    state_term = sum_over_row(state_term);
    if (lane_col() == 0) gates.writes[team][row + 8 * i] = state_term;
  }
}

// Sums the term of S of the warp's rows, on which the gates up to each row act.
template <bool Gated>
__device__ inline void SegmentGradients<Gated>::sum_state_reads(const Accumulator<8>& sums) const {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float state_term = 0.f;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      state_term =
          add_dot(state_term, four(sums, i, m), four(tile(kReaderRows + team), from + 8 * i, kBlock * m));
    }
    state_term = sum_over_row(state_term);
    if (lane_col() == 0)
      (steps() ? gates.steps : gates.queries[team])[from + lane_row() + 8 * i] += state_term;
  }
}

// Sums of E_ij A_ij (x_i . k_j) over j before a row and i, of the warp, at the row or later.
template <bool Gated>
__device__ inline void SegmentGradients<Gated>::sum_pairs() const {
  const int reads = blocks();
  Accumulator<8> pairs;
  fill(pairs, 0.f);
#pragma unroll 1
  for (int c = 0; c < kTile; c += kBlock) {
    SplitAFragment a;
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
      const Pack<4> weight = four(tile(kReaderTiles + team), from + 8 * i, kBlock * m);
#pragma unroll
      for (int e = 0; e < 4; ++e) x.at[e] *= weight.at[e];
      // Exclusive sum over the lane's group of four, and the sum of all four.
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

// dg of the tokens of the segment, for the 64 columns of D of the block.
template <bool Gated>
__device__ inline void SegmentGradients<Gated>::store_gates() const {
  __syncthreads();
  const int t = thread / kTokenLanes, part = thread % kTokenLanes;
  float dg = 0.f;
  for (int i = t + part; i < rows_of(false); i += kTokenLanes)
    dg += gates.queries[0][i] + gates.queries[1][i];
  for (int i = t * n + part; i < rows_of(true); i += kTokenLanes) dg += gates.steps[i];
  for (int j = part; j < t * n && j < rows_of(true); j += kTokenLanes) {
    dg += gates.writes[0][j] + gates.writes[1][j];
  }
  if (t < segment_info.tokens) {
    for (int w = part; w < kWarps; w += kTokenLanes) dg += gates.pairs[w][t * n];
  }
  dg += __shfl_xor_sync(~0u, dg, 1);
  dg += __shfl_xor_sync(~0u, dg, 2);
  if (part == 0 && t < segment_info.tokens) {
    float whole = 0.f;
    for (int w = 0; w < kWarps; ++w) whole += gates.parts[w];
    const SequenceLayout& all = shape.segments.tokens;
    p.dg[((slab * all.batch + segment_info.batch) * all.tokens + segment_info.start + t) * shape.heads +
         segment_info.head] = fmaf(gates.decay_from_block_start[segment_info.tokens - 1], whole, dg);
  }
}

}  // namespace girih::kernels::delta_product::fp32_gradients
