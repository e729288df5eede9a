// What the exact scan's chains multiply with beside rows, made ahead of them.
#pragma once

#include "delta_product/exact_tiles.cuh"
#include "tile/tf32.h"

namespace girih::kernels::delta_product::by_tile {

// d += a b, a 8 x 4, b 4 x 8: of a the lane has (lane / 4, lane % 4), of b (lane % 4, lane / 4), of d
// (lane_row(), lane_col()) and the next.
__device__ inline void mma_f64(double (&d)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};\n"
      : "+d"(d[0]), "+d"(d[1])
      : "d"(a), "d"(b));
}

// x y^T, sixteen rows of each. A lane's four columns are neighbours. (In a loop, here and below: the
// instructions of all roles together have to stay in a multiprocessor's cache.)
template <int Tile>
__device__ inline Sums<2> scores(const RowsOfTile<Tile>& x, const RowsOfTile<Tile>& y) {
  SplitSums<2> sums;
  sums.clear();
#pragma unroll 1
  for (int col = 0; col < Tile; col += 16) {
    SplitBlock block;
    block.load(x, 0, col);
    float right[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) take_four(right[n], &y.at(8 * n, col, lane_row(), 2 * lane_col()));
    sums.template add<false>(block, right);
  }
  Sums<2> all;
  sums.put(all.at);
  return all;
}

// Of sixteen rows by sixteen columns the lane's, as of Sums<2>.
using Scores64 = double[2][4];

// b k^T, or Reverse k b^T, where b's row is not before k's.
template <bool Reverse, int Tile>
__device__ inline void exact_scores(Scores64& scores, const RowsOfTile<Tile>& b, const RowsOfTile<Tile>& k) {
  double sums[2][2][2] = {};
#pragma unroll 1
  for (int col = 0; col < Tile; col += 16) {
    double of_b[2][4], of_k[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      take_four(of_b[n], &b.at(8 * n, col, lane_row(), 2 * lane_col()));
      take_four(of_k[n], &k.at(8 * n, col, lane_row(), 2 * lane_col()));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int down = 0; down < 2; ++down) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          if (Reverse ? down > right : down < right) continue;
          mma_f64(sums[down][right], (Reverse ? of_k : of_b)[down][i], (Reverse ? of_b : of_k)[right][i]);
        }
      }
    }
  }
  each_sum<2>([&](int n, int i) { scores[n][i] = sums[i / 2][n][i % 2]; });
}

// e^ of the gates up to every row and after it. Their sums are differences of fp64 ones: of fp32 ones short
// sums behind long ones would have no digits.
__device__ inline void put_decays(Weights& weights, MakerSpace& own, const float* gates) {
  const int row = lane() % kRows;
  double through = 0., all = 0.;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    // One that closes takes no digits from the others; NaN stays.
    all += gates[i] < -1e4f ? -1e4f : gates[i];
    if (i == row) through = all;
  }
  own.gates[row] = through;
  weights.through[row] = expf(static_cast<float>(through));
  weights.after[row] = expf(static_cast<float>(all - through));
  weights.whole = expf(static_cast<float>(all));
  __syncwarp();
}

// Scores of rows and columns, the read row's and the written one's, or Reverse the other way round: those of
// a row that reads and one written before it, with `itself` that row too, times their decay and `scale`.
template <bool Reverse, class T>
__device__ inline void weigh(T (&scores)[2][4], const double* gates, bool itself, float scale) {
  each_sum<2>([&](int n, int i) {
    const int row = lane_row() + 8 * (i / 2), col = 8 * n + lane_col() + i % 2;
    const int read = Reverse ? col : row, written = Reverse ? row : col;
    float by = scale;
    if (gates != nullptr) by *= expf(static_cast<float>(gates[read] - gates[written]));
    scores[n][i] = read > written || (itself && read == written) ? by * scores[n][i] : T{};
  });
}

// Of a row that ends a token which one it is of its piece's; else -1.
template <bool Reverse>
__device__ inline void put_tokens(Weights& weights, const TileWalk<Reverse>& walk) {
  const int i = lane();
  if (i < kRows) weights.token[i] = i < walk.rows() && walk.ends_token(i) ? walk.token_of_piece(i) : -1;
}

// The lane's column of X = (1 + A)^-1, row after row:   x_i = [i = column] - sum_{m<i} A_im x_m
__device__ inline void solve(double (&x)[kRows], const double (&a)[kRows][kRows], int column) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    double sums[2] = {i == column ? 1. : 0., 0.};
#pragma unroll
    for (int m = 0; m < i; m += 2) {
      const double2 two = *reinterpret_cast<const double2*>(&a[i][m]);
      sums[0] = fma(-two.x, x[m], sums[0]);
      if (m + 1 < i) sums[1] = fma(-two.y, x[m + 1], sums[1]);
    }
    x[i] = sums[0] + sums[1];
  }
}

// Where row i of those that are summed over lies in a row of X or P.
__device__ constexpr int place_of(int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; }

// X of A, which the lanes have. Both are fp64, and X is handed on in three parts: where a key comes again and
// again, and beta is 2, the same roundings of A = 2 k . k, or of X, come back with every token, and a unit in
// the last place of fp32 is more than all roundings of a tile beside it.
template <bool Reverse>
__device__ inline void put_inverse(Weights& weights, MakerSpace& own, const Scores64& a) {
  each_sum<2>([&](int n, int i) {
    const int row = lane_row() + 8 * (i / 2), col = 8 * n + lane_col() + i % 2;
    own.a[Reverse ? col : row][Reverse ? row : col] = a[n][i];
  });
  __syncwarp();
  double x[kRows];
  const int column = lane() % kRows;
  solve(x, own.a, column);
  __syncwarp();
  if (lane() < kRows) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int part = 0; part < kInverseParts; ++part) {
        const uint32_t high = Parts(static_cast<float>(x[i])).high;
        (Reverse ? weights.x[part][column][place_of(i)] : weights.x[part][i][place_of(column)]) = high;
        x[i] -= __uint_as_float(high);
      }
    }
  }
}
__device__ inline void put_reads(Weights& weights, const Sums<2>& p) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<float4*>(&weights.p[lane_row() + 8 * i][2 * lane_col()]) = {
        p.at[0][2 * i], p.at[0][2 * i + 1], p.at[1][2 * i], p.at[1][2 * i + 1]};
  }
}

// Warp `maker` of the makers makes X and P of every kMakers-th visit. There are no more makers than stages:
// whoever waits for a stage has seen all visits but the last few, and its phase is not two ahead of the
// barrier's.
//
//     A_ij = E_ij b_i . k_j  (j < i)     X = (1 + A)^-1     P_ij = scale E_ij q_i . k_j  (j <= i)
template <int Tile, bool Reverse>
__device__ inline void make_weights(const DeltaExactScan& p, const Walked& here, const TileSpace<Tile>& space,
                                    int maker) {
  TileBarriers& barriers = space.barriers();
  MakerSpace& own = space.maker(maker);
  const bool gated = p.g.data != nullptr;
  const double* const gates = gated ? own.gates : nullptr;
  const int makers = space.stages < kMakers ? space.stages : kMakers;
  if (maker >= makers) return;
  Turn turn;
  int next = maker;  // visits until the maker's
#pragma unroll 1
  for (TileWalk<Reverse> walk(p.shape, here); walk.more(); walk.next()) {
#pragma unroll 1
    for (int member = 0; member < here.group; ++member, turn.next(space.stages)) {
      if (next-- > 0) continue;
      next = makers - 1;
      const int stage = turn.place;
      wait(&barriers.full[stage], turn.parity);
      Weights& weights = space.weights(stage);
      if (gated) put_decays(weights, own, space.gates(stage));
      put_tokens(weights, walk);
      const bool has_steps = member == (Reverse ? here.group - 1 : 0);
      const auto q = space.q(stage), k = space.k(stage);
      Sums<2> reads = scores(Reverse ? k : q, Reverse ? q : k);
      weigh<Reverse>(reads.at, gates, true, p.shape.scale);
      put_reads(weights, reads);
      if (has_steps) {
        Scores64 steps;
        exact_scores<Reverse>(steps, space.b(stage), k);
        weigh<Reverse>(steps, gates, false, 1.f);
        put_inverse<Reverse>(weights, own, steps);
      }
      arrive_once(&barriers.made[stage]);
    }
  }
}

}  // namespace girih::kernels::delta_product::by_tile
