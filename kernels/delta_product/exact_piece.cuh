// A block of the exact gradients: what it has of a piece, and its phases.
#pragma once

#include "delta_product/between.h"
#include "delta_product/pieces.h"
#include "exact/tiles.cuh"

namespace girih::kernels::delta_product::by_piece {

using exact::add_dot, exact::add_product, exact::add_scaled, exact::add_scores, exact::block_of_rows,
    exact::clear, exact::four, exact::kPitch, exact::kThreads, exact::kTile, exact::kTileFloats,
    exact::lane_of_row, exact::load_matrix, exact::own_rows, exact::put;

constexpr int kParts = kThreads / kTile;

struct GradientSpace {
  // Of the piece's tokens: its gate, e^{gates through it}, e^{those after it}.
  float gate[kTile], through[kTile], after[kTile];
  // What the gates up to a query or a step scale of S, and those after a row of dS.
  float queries[kTile], steps[kTile], writes[kTile];
  float parts[kThreads / 32];  // S * dS, added up by the warps
  float dg[kThreads];          // of token thread / kParts, the threads' parts
  int token[kTile];            // of a row
  // Of the piece; here for want of registers.
  int64_t batch, start, states;  // row of x, first token, where its states begin
  int head, tokens;
  bool opens;
};
constexpr int kSpaceFloats = (static_cast<int>(sizeof(GradientSpace)) + 15) / 16 * 4;

constexpr int gradient_floats(bool gated) { return (4 + gated) * kTileFloats + kSpaceFloats; }

// Sums over V take their terms four at a time: one by one, 256 of them lost twice as many digits.
//     sum += x . y
__device__ inline void add_four(float& sum, const Pack<4>& x, const Pack<4>& y) {
  float part = x.at[0] * y.at[0];
#pragma unroll
  for (int i = 1; i < 4; ++i) part = fmaf(x.at[i], y.at[i], part);
  sum += part;
}
//     sums += x tile[m..m+3, col..col+3]
__device__ inline void add_four(Pack<4> (&sums)[4], const Pack<4> (&x)[4], const float* tile, int m,
                                int col) {
  Pack<4> y[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) y[j] = four(tile, m + j, col);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      add_four(sums[r].at[c], x[r], {{y[0].at[c], y[1].at[c], y[2].at[c], y[3].at[c]}});
    }
  }
}

// Sums over the 16 lanes that share rows.
__device__ inline float over_row(float x) {
#pragma unroll
  for (int other = 1; other < 16; other *= 2) x += __shfl_xor_sync(~0u, x, other);
  return x;
}

// A block: of its memory head the rows of one piece, and 64 columns of D.
template <bool Gated>
struct PieceGradients {
  const DeltaExactGradients& p;
  const DeltaExactShape& shape;
  float *const left, *const right, *const third, *const fourth, *const decays;
  GradientSpace& space;
  const int D, V, n;
  const int slab, col;  // of D
  const int a, b, thread;
  Pack<4> dk[4];
  bool idle;  // of a reader: the thread's four rows do not exist
  int cols;   // and how many rows they read, at most

  __device__ PieceGradients(const DeltaExactGradients& p, float* shared, int slab)
      : p(p),
        shape(p.shape),
        left(shared),
        right(left + kTileFloats),
        third(right + kTileFloats),
        fourth(third + kTileFloats),
        decays(fourth + kTileFloats),
        space(*reinterpret_cast<GradientSpace*>(fourth + (1 + Gated) * kTileFloats)),
        D(in_fours(p.shape.D)),
        V(in_fours(p.shape.V)),
        n(p.shape.n),
        slab(slab),
        col(slab * kTile),
        a(lane_of_row()),
        b(block_of_rows()),
        thread(static_cast<int>(threadIdx.x)) {}

  // False: the piece has no tokens.
  __device__ bool find(int64_t piece_head);
  __device__ void sum_gates() const;
  // The gradient of what reads, x, from that of what it read, dx: sums over V, then over rows. A query reads
  // the rows of tokens up to its own, a step the rows before its own. Beside it what the rows x give dk.
  template <bool Steps>
  __device__ void add_reader(const In<4>& x, const In<4>& dx, float factor, const Out<4>& to, int of,
                             float* far_sums);
  __device__ void put_gates() const;

  __device__ int rows_of(bool steps) const { return steps ? space.tokens * n : space.tokens; }
  __device__ void store_rows(const Out<4>& to, bool steps, int of, const Pack<4> (&sums)[4]) const {
    float* const data = static_cast<float*>(to.data) + space.batch * to.stride[0] +
                        space.start * (steps ? n : 1) * to.stride[1] + of * to.stride[2] + col + 4 * a;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (4 * b + r < rows_of(steps) && col + 4 * a < D) {
        store<4>(data + (4 * b + r) * to.stride[1], sums[r]);
      }
    }
  }

 private:
  template <bool Steps>
  __device__ void sum_values(Pack<4> (&scores)[4], Pack<4> (&sums)[4], float& both, const In<4>& dx, int of);
  template <bool Steps>
  __device__ void weigh(const Pack<4> (&scores)[4], Pack<4> (&sums)[4], float factor) const;
  template <bool Steps>
  __device__ void weigh_pairs(const Pack<4> (&sums)[4], float both, float* far_sums);
  template <bool Steps>
  __device__ void sum_rows(Pack<4> (&sums)[4]);
  template <bool Steps>
  __device__ void add_gates() const;

  // Of an array the piece's rows, columns from..from+63 of `width`, to a tile.
  __device__ void load_rows(float* tile, const In<4>& x, bool steps, int of, int from, int width) const {
    const float* const data = static_cast<const float*>(x.data) + space.batch * x.stride[0] +
                              space.start * (steps ? n : 1) * x.stride[1] + of * x.stride[2] + from;
    load_matrix(tile, data, x.stride[1], rows_of(steps), width - from);
  }
  // The columns v..v+63 of S or dS, [V, D], to a tile.
  __device__ void load_state(float* tile, const float* states, int v) const {
    const float* const from = states + space.states + v * D + col;
    load_matrix(tile, from, D, shape.V - v, D - col);
  }
};

template <bool Gated>
__device__ inline bool PieceGradients<Gated>::find(int64_t piece_head) {
  const DeltaPiece piece = piece_at(shape.pieces, piece_head / shape.heads);
  if (piece.length == 0) return false;
  if (thread == 0) {
    space.batch = piece.sequence.batch, space.start = piece.start;
    space.states = piece_head * shape.V * D;
    space.head = static_cast<int>(piece_head % shape.heads), space.tokens = piece.length;
    space.opens = piece.opens;
  }
  if (thread < kTile) space.token[thread] = thread / n;
  space.dg[thread] = 0.f;
  __syncthreads();
  return true;
}

// e^{gates through a token}, e^{those after it}, and E.
template <bool Gated>
__device__ inline void PieceGradients<Gated>::sum_gates() const {
  // Not differences of sums: long sums have no digits left for short ones.
  const auto gate = [&](int token) { return space.gate[token]; };
  if (thread < kTile) {
    const int64_t at =
        space.batch * p.g.stride[0] + (space.start + thread) * p.g.stride[1] + space.head * p.g.stride[2];
    space.gate[thread] = thread < space.tokens ? static_cast<const float*>(p.g.data)[at] : 0.f;
    space.queries[thread] = 0.f;
  }
  __syncthreads();
  if (thread < kTile) {
    float through = 0.f, after = 0.f;
    for (int t = 0; t <= thread; ++t) through += gate(t);
    for (int t = space.tokens - 1; t > thread; --t) after += gate(t);
    space.through[thread] = expf(through);
    space.after[thread] = expf(after);
  }
  // E of tokens: row t, column s <= t.
  const int s = thread % kTile, first = thread / kTile * (kTile / kParts);
  float sum = 0.f;
  for (int t = s + 1; t < first; ++t) sum += gate(t);
  for (int t = first; t < first + kTile / kParts; ++t) {
    if (t > s) sum += gate(t);
    decays[t * kPitch + s] = t < s ? 0.f : expf(sum);
  }
}

// F = do S, or -du S, A_ij = do_i . u_j, or -du_i . u_j, and of steps u dS, over V. both: S * dS.
template <bool Gated>
template <bool Steps>
__device__ inline void PieceGradients<Gated>::sum_values(Pack<4> (&scores)[4], Pack<4> (&sums)[4],
                                                         float& both, const In<4>& dx, int of) {
#pragma unroll 1
  for (int v = 0; v < V; v += kTile) {
    __syncthreads();
    load_rows(left, dx, Steps, of, v, V);
    load_rows(right, p.u, true, space.head, v, V);
    load_state(third, p.states, v);
    if constexpr (Steps) load_state(fourth, p.gradients, v);
    if (space.opens) {
      // As the thread has written it.
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        Pack<4> state = four(third, b + 16 * i, 4 * a);
#pragma unroll
        for (int e = 0; e < 4; ++e) state.at[e] = between(shape.pieces.between, state.at[e]);
        put(third, b + 16 * i, 4 * a, state);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int m = idle ? kTile : 0; m < kTile; m += 4) {
      Pack<4> reads[4];
      own_rows(reads, left, m);
      add_scores(scores, reads, right, m, cols,
                 [](float& sum, const Pack<4>& x, const Pack<4>& y) { add_four(sum, x, y); });
      add_four(sums, reads, third, m, 4 * a);
      if constexpr (Steps) {
        own_rows(reads, right, m);
        add_four(dk, reads, fourth, m, 4 * a);
      }
    }
    if constexpr (Steps && Gated) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        add_dot(both, four(third, b + 16 * i, 4 * a), four(fourth, b + 16 * i, 4 * a));
    }
  }
  __syncthreads();
}

// E * A to a tile, and e^L F.
template <bool Gated>
template <bool Steps>
__device__ inline void PieceGradients<Gated>::weigh(const Pack<4> (&scores)[4], Pack<4> (&sums)[4],
                                                    float factor) const {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int i = 4 * b + r;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int j = a + 16 * c;
      const bool seen = Steps ? j < i : space.token[j] <= i;
      float weight = seen ? factor * scores[r].at[c] : 0.f;
      if constexpr (Gated) {
        if (seen) weight *= decays[(Steps ? space.token[i] : i) * kPitch + space.token[j]];
      }
      third[i * kPitch + j] = weight;
    }
    float by = factor;
    if constexpr (Gated) by *= space.through[Steps ? space.token[i] : i];
#pragma unroll
    for (int c = 0; c < 4; ++c) sums[r].at[c] *= by;
  }
}

// A pair's share of the gates between its rows, E_ij A_ij (x_i . k_j), to a tile; and what gates scale of S
// and dS.
template <bool Gated>
template <bool Steps>
__device__ inline void PieceGradients<Gated>::weigh_pairs(const Pack<4> (&sums)[4], float both,
                                                          float* far_sums) {
  if constexpr (Steps) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) dk[r].at[c] *= space.after[space.token[4 * b + r]];
      float far = 0.f;
      add_dot(far, dk[r], four(right, 4 * b + r, 4 * a));
      far = over_row(far);
      if (a == 0) space.writes[4 * b + r] = far;
    }
    both = over_row(both);
    both += __shfl_xor_sync(~0u, both, 16);
    if (thread % 32 == 0) space.parts[thread / 32] = both;
  }
  // A pair's share of the gates between its rows.
  Pack<4> pairs[4];
  clear(pairs);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float far = 0.f;
    add_dot(far, sums[r], four(left, 4 * b + r, 4 * a));
    far = over_row(far);
    if (a == 0) far_sums[4 * b + r] += far;
  }
#pragma unroll 1
  for (int m = idle ? kTile : 0; m < kTile; m += 4) {
    Pack<4> reads[4];
    own_rows(reads, left, m);
    add_scores(pairs, reads, right, m, cols);
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int at = (4 * b + r) * kPitch + a + 16 * c;
      fourth[at] = pairs[r].at[c] * third[at];
    }
  }
}

// dq, db += (E * A) K        dk += (E * A)^T (Q, or B)
template <bool Gated>
template <bool Steps>
__device__ inline void PieceGradients<Gated>::sum_rows(Pack<4> (&sums)[4]) {
#pragma unroll 2
  for (int j = 0; j < cols; j += 4) {
    Pack<4> weight[4];
    own_rows(weight, third, j);
    add_product(sums, weight, right, j);
  }
  // From the first that reads the thread's rows on.
#pragma unroll 4
  for (int i = Steps ? 4 * b : space.token[4 * b]; i < rows_of(Steps); ++i) {
    const Pack<4> weight = four(third, i, 4 * b), read = four(left, i, 4 * a);
#pragma unroll
    for (int r = 0; r < 4; ++r) add_scaled(dk[r], weight.at[r], read);
  }
}

// Of token t's gate: pairs of a write before it and a read at it or later.
template <bool Gated>
template <bool Steps>
__device__ inline void PieceGradients<Gated>::add_gates() const {
  __syncthreads();
  const int t = thread / kParts;
  float dg = space.dg[thread];
  for (int i = (Steps ? t * n : t) + thread % kParts; i < rows_of(Steps); i += kParts) {
    Pack<4> sums_of = zeros<4>();
    int j = 0;
    for (; j + 4 <= t * n; j += 4) add_scaled(sums_of, 1.f, four(fourth, i, j));
    for (; j < t * n; ++j) dg += fourth[i * kPitch + j];
#pragma unroll
    for (int e = 0; e < 4; ++e) dg += sums_of.at[e];
  }
  space.dg[thread] = dg;
}

template <bool Gated>
template <bool Steps>
__device__ inline void PieceGradients<Gated>::add_reader(const In<4>& x, const In<4>& dx, float factor,
                                                         const Out<4>& to, int of, float* far_sums) {
  const int most = (4 * b + 4) * (Steps ? 1 : n);
  idle = 4 * b >= rows_of(Steps), cols = idle ? 0 : most < kTile ? most : kTile;
  Pack<4> scores[4], sums[4];
  clear(scores);
  clear(sums);
  float both = 0.f;
  sum_values<Steps>(scores, sums, both, dx, of);
  weigh<Steps>(scores, sums, factor);
  // The rows of the reader and of K to two other tiles.
  load_rows(left, x, Steps, of, col, D);
  load_rows(right, p.k, true, space.head, col, D);
  __syncthreads();
  if constexpr (Gated) weigh_pairs<Steps>(sums, both, far_sums);
  sum_rows<Steps>(sums);
  store_rows(to, Steps, of, sums);
  if constexpr (Gated) add_gates<Steps>();
}

// dg of the piece's tokens, of these columns of D.
template <bool Gated>
__device__ inline void PieceGradients<Gated>::put_gates() const {
  __syncthreads();
  const int t = thread / kParts;
  float dg = space.dg[thread];
  for (int i = t + thread % kParts; i < rows_of(false); i += kParts) dg += space.queries[i];
  for (int i = t * n + thread % kParts; i < rows_of(true); i += kParts) dg += space.steps[i];
  for (int j = thread % kParts; j < t * n && j < rows_of(true); j += kParts) dg += space.writes[j];
  dg += __shfl_xor_sync(~0u, dg, 1);
  dg += __shfl_xor_sync(~0u, dg, 2);
  if (thread % kParts == 0 && t < space.tokens) {
    float whole = 0.f;
    for (int w = 0; w < kThreads / 32; ++w) whole += space.parts[w];
    const Tokens& all = shape.pieces.tokens;
    p.dg[((slab * all.batch + space.batch) * all.tokens + space.start + t) * shape.heads + space.head] =
        fmaf(space.through[space.tokens - 1], whole, dg);
  }
}

}  // namespace girih::kernels::delta_product::by_piece
